"""The model of a run that has been trained, for whoever uses it: generation, reports, Python."""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from expertmesh.checkpoints.dcp import tensor_dtypes
from expertmesh.checkpoints.load import load_weights
from expertmesh.config.run import RunConfig
from expertmesh.models.family import Task
from expertmesh.moe.experts import GroupedExperts
from expertmesh.parallel.inference import spread_for_inference
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import Precision, resolve_precision
from expertmesh.runs.room import check_weights
from expertmesh.runs.run_dir import TOKENIZER, Run
from expertmesh.text.format import told_by_files


class Trained(NamedTuple):
    """A trained model in this process.

    Attributes:
        task: what trained it.
        model: in evaluation mode, with the weights of the run's newest good checkpoint, of the type that they have there.
        precision: what it computes in, and where; of weights in BF16 or FP16 that type.
    """

    task: Task
    model: nn.Module
    precision: Precision


def open_trained(
    run: Run,
    *,
    precision: Precision | None = None,
    ranks: Ranks | None = None,
    es_degree: int | None = None,
    for_autocast: bool = False,
) -> Trained:
    """Build the model of a run and load its weights.

    Args:
        run: of `load_run`.
        precision: what to compute in; None: what the run's configuration says here.
        ranks: those that run the model together, see `spread_for_inference`; every rank must call. None: this process alone.
        es_degree: slices of each expert, see there.
        for_autocast: the model will only be used under `precision.autocast()`, which casts the weights of all experts in
            each call, for one token, too: they are kept in that type, with the same results.

    Raises:
        ConfigError: the run's device or type is not to be had here, or the ranks do not fit its layers.
        CheckpointError: the checkpoint is damaged.
    """
    if precision is None:
        precision = resolve_precision(run.config.train, record=run.arithmetic)
    precision = _of_stored(run, precision)
    task: Task = run.family.open_task(_told(run))
    world = None if ranks is None else ranks.world
    device, dtype = precision.device, precision.master_dtype
    num_ranks = 1 if world is None else world.size
    check_weights(run.family, run.config, device, num_ranks=num_ranks)

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if for_autocast and isinstance(module, GroupedExperts):
                module.to(precision.compute_dtype)
        if world is not None:
            spread_for_inference(model, world, es_degree=es_degree)

    if world is None:
        model = task.build(device=device, dtype=dtype)
        prepare(model)
    else:
        model = task.build_spread(prepare, device=device, dtype=dtype)
    load_weights(run.checkpoint, model)
    return Trained(task, model.eval(), precision)


def _told(run: Run) -> RunConfig:
    """The run's configuration; its model knows what the files beside the tokenizer say of texts, old runs' too."""
    config = run.config
    model: Any = getattr(config, "model", None)
    if not (run.family.generates_text and hasattr(model, "start_ids")):
        return config
    told = told_by_files(run.path / TOKENIZER, run.load_tokenizer)
    ends, start = (*model.end_ids, *told.get("end_ids", ())), model.start_ids
    changes = {
        "model.end_ids": tuple(dict.fromkeys(ends)),
        "model.start_ids": told.get("start_ids") if start is None else start,
    }
    return config.updated(changes) if told else config


def _of_stored(run: Run, precision: Precision) -> Precision:
    """The precision for weights as they are stored, but for routers and other tensors that are kept wider: a converted run has BF16 ones."""
    dtypes = tensor_dtypes(run.checkpoint).items()
    found = [
        dtype for name, dtype in dtypes if name.startswith("model.") and dtype.is_floating_point
    ]
    narrowest = min(found, key=lambda dtype: dtype.itemsize, default=precision.master_dtype)
    if narrowest.itemsize >= precision.master_dtype.itemsize:
        return precision
    return replace(precision, compute_dtype=narrowest, master_dtype=narrowest)
