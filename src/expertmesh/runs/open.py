"""Opening of models from folders: runs of ours, models of the hub, and quantised folders.

`find_model` describes a folder and reads no weights; `open_model` makes the model. Training places models itself and
takes only the weights, by `Run.load_into`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.models.task import Task
from expertmesh.moe.layer import grouped_layers
from expertmesh.parallel.inference import spread_for_inference
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.serving import as_plain
from expertmesh.runs.arithmetic import Arithmetic
from expertmesh.runs.check_memory import check_weights
from expertmesh.runs.paged import put_slots
from expertmesh.runs.precision import (
    Precision,
    plain_precision,
    resolve_device,
    trained_precision,
)
from expertmesh.runs.quantized import PackedExperts, put_quantized
from expertmesh.runs.run_dir import TOKENIZER, Run, find_model
from expertmesh.text.format import TextFormat, options_of_files, text_format


@dataclass(frozen=True)
class LoadedModel:
    """A trained model in this process. `model, tokenizer = loaded` takes the two apart."""

    run: Run  # the folder: path, configuration, family
    task: Task  # the family's task for its configuration
    model: nn.Module  # the model in evaluation mode, with weights of the folder in their stored type
    tokenizer: Tokenizer | None  # tokenizer of the folder; None for families that read no text
    precision: Precision  # device and types of its computation; weights in BF16 or FP16 compute in their type
    ranks: Ranks  # ranks that have parts of the model; all make the same calls
    shared: Any = None  # `EngineRanks`, by which the ranks of an engine share the model; None: they do not

    def __iter__(self) -> Iterator[Any]:
        """Model and tokenizer."""
        return iter((self.model, self.tokenizer))

    @cached_property
    def decoder(self) -> Any:
        """The model's interface for generation: a `CausalLM`, or an `EncoderDecoder` for a family that translates."""
        return self.task.builder.decoder(self.model)

    @cached_property
    def text(self) -> TextFormat:
        """The model's text format: its tokenizer, special tokens and chat template."""
        tokenizer = self.run.load_tokenizer() if self.tokenizer is None else self.tokenizer
        return text_format(tokenizer, self.run.path / TOKENIZER, model=self.decoder)


def open_model(
    source: str | Path | Run,  # the folder, see `find_model`; or the `Run` that it returned, perhaps changed
    *,
    family: Family | None = None,  # see `find_model`
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    es_degree: int | None = None,  # slices of each expert, see `spread_for_inference`
    for_autocast: bool = False,
    is_placed: bool = False,
    slots: "Slots | None" = None,
    share: Callable[[nn.Module], object] | None = None,
) -> LoadedModel:
    """Build the model of a folder and load its weights. The ranks share the comparison of checksums.

    Args:
        device: device of the computation, see `device_of`; None: the device of the training.
        dtype: type of weights and products (routers keep FP32); None: the type of the files; a run's products have the
            type of its training.
        ranks: ranks that run the model together, see `spread_for_inference`; every rank must call. None: this process
            alone.
        for_autocast: whether the model will only be used under `precision.autocast()`. Experts are then kept in that
            type, with the same results, instead of being cast in each call.
        is_placed: spread the model over the ranks by `parallel` of its configuration, as in training; its tokenizer is
            not read.
        slots: keep experts in the files and copy those that tokens choose to the device; None: all experts are on the
            device.
        share: function that cuts the model for the ranks by `expertmesh.parallel.serving`, before it has weights, in
            place of `spread_for_inference`.
    """
    plan = _OpenPlan(
        Ranks() if ranks is None else ranks,
        dtype=dtype,
        es_degree=es_degree,
        for_autocast=for_autocast,
        is_placed=is_placed,
        slots=slots,
        share=share,
    )
    plan.ranks.on_all(lambda: _resolve(plan, source, family, device))
    _check(plan)
    return plan.ranks.on_all(lambda: _build(_open(plan)))


@dataclass(frozen=True)
class Slots:
    """Slots of each layer for experts that stay in their files; see `put_slots`."""

    count: int
    fetch_ahead: bool | None = None


@dataclass
class _OpenPlan:
    """Arguments of a call of `open_model`, and what its steps find."""

    ranks: Ranks
    dtype: torch.dtype | None
    es_degree: int | None
    for_autocast: bool
    is_placed: bool
    slots: Slots | None
    share: Callable[[nn.Module], object] | None
    run: Run = field(init=False)
    tokenizer: Tokenizer | None = field(init=False)
    device: torch.device = field(init=False)
    trained: Arithmetic | None = field(init=False)
    """Arithmetic of the run's training; None: not recorded, or a hub folder."""
    weights: TensorSource = field(init=False)
    precision: Precision = field(init=False)
    task: Task = field(init=False)


def _resolve(
    plan: _OpenPlan,
    source: str | Path | Run,
    family: Family | None,
    device: str | torch.device | None,
) -> None:
    """Find the folder, its tokenizer and the device."""
    run = source if isinstance(source, Run) else find_model(source, family)
    run.check_whole()
    has_text = run.family.generates_text or TOKENIZER in run.family.files
    plan.run, plan.device = run, device_of(run, device)
    plan.tokenizer = run.load_tokenizer() if has_text and not plan.is_placed else None


def _check(plan: _OpenPlan) -> None:
    """Choose the newest undamaged checkpoint, and read how it was trained."""
    plan.run = run = plan.run.with_weights(plan.ranks)

    def trained() -> Arithmetic | None:
        known = run.config.train
        found = None if run.is_hub else trained_precision(run.arithmetic, known, plan.device)
        return None if found is None else found.arithmetic

    plan.trained = plan.ranks.on_rank0(trained)


def _open(plan: _OpenPlan) -> _OpenPlan:
    """Open the weights, whose types give the precision, and check that their model fits the machine and the ranks."""
    run, ranks = plan.run, plan.ranks
    plan.weights = run.open_weights(plan.dtype)
    plan.precision = _precision_of(plan.weights, plan.dtype, plan.device, plan.trained)
    is_packed = isinstance(plan.weights, PackedExperts)
    if (is_packed or plan.slots is not None) and ranks.size > 1 and plan.share is None:
        raise ConfigError(
            f"{run.path}: is {'quantised' if is_packed else 'given expert slots'}, and ranks share such experts in an "
            "engine; give"
            " em.Engine(..., parallel=), or open the model as it was trained"
        )
    plan.task = run.family.open_task(_with_ids_of_files(run, plan.tokenizer))
    if not is_packed and plan.slots is None:
        check_weights(run.family, run.config, plan.device, num_ranks=ranks.size)
    if plan.is_placed:
        plan.task.builder.check(ranks.size)
    return plan


def _build(plan: _OpenPlan) -> LoadedModel:
    """The model with its weights."""
    builder, used, ranks = plan.task.builder, plan.precision, plan.ranks
    if plan.is_placed:
        model = builder.place(device=used.device, dtype=used.master_dtype, ranks=ranks)
    else:
        model = builder.build_spread(
            lambda model: _prepare(model, plan),
            device=used.device,
            dtype=used.master_dtype,
            is_read_next=True,
            in_huge_pages=plan.slots is None,
        )
    read_into(plan.weights, model.state_dict())
    if plan.share is not None:
        as_plain(model)
    return LoadedModel(plan.run, plan.task, model.eval(), plan.tokenizer, used, ranks)


def _prepare(model: nn.Module, plan: _OpenPlan) -> None:
    """Give a model without memory its formats, and cut it for the ranks."""
    if plan.for_autocast:  # experts in the type that autocast casts them to
        for _, _, experts in grouped_layers(model):
            experts.to(plan.precision.compute_dtype)
    if isinstance(plan.weights, PackedExperts):
        put_quantized(model, plan.weights)
    if plan.share is not None:
        plan.share(model)
    elif plan.ranks.world is not None:
        spread_for_inference(model, plan.ranks.world, es_degree=plan.es_degree)
    if plan.slots is not None:
        put_slots(
            model,
            plan.weights,
            num_slots=plan.slots.count,
            fetch_ahead=plan.slots.fetch_ahead,
            device=plan.device,
        )


def device_of(run: Run, device: str | torch.device | None) -> torch.device:
    """Device for using a model. `device`: auto, cpu, cuda or cuda:N; None: the device of the training."""
    name = run.config.train.device if device is None else str(device)
    return resolve_device(name, option="device")


def _with_ids_of_files(run: Run, tokenizer: Tokenizer | None) -> RunConfig:
    """The run's configuration, with `end_ids` and `start_ids` from the files beside the tokenizer, which old runs
    lack."""
    config = run.config.model_copy(update={"adapter": AdapterConfig()})  # merged into its weights
    model: Any = getattr(config, "model", None)
    if tokenizer is None or not (run.family.generates_text and hasattr(model, "start_ids")):
        return config
    told = options_of_files(run.path / TOKENIZER, tokenizer)
    ends, start = (*model.end_ids, *told.get("end_ids", ())), model.start_ids
    changes = {
        "model.end_ids": tuple(dict.fromkeys(ends)),
        "model.start_ids": told.get("start_ids") if start is None else start,
    }
    return config.updated(changes) if told else config


def _precision_of(
    weights: TensorSource,
    dtype: torch.dtype | None,
    device: torch.device,
    known: Arithmetic | None,
) -> Precision:
    """The given type, or the training's, or the narrowest of stored weights: converted runs have BF16 beside FP32
    routers."""
    if dtype is not None:
        return plain_precision(dtype, device, "as asked for")
    if isinstance(weights, PackedExperts):
        return plain_precision(weights.products_dtype, device, "the type of its scales")
    kept = {tensor.dtype for tensor in weights.tensors.values() if tensor.dtype.is_floating_point}
    narrowest = min(kept, key=lambda one: (one.itemsize, str(one)), default=torch.float32)
    found = None if known is None else Precision.of(device, known)
    if found is not None and narrowest.itemsize >= found.master_dtype.itemsize:
        return found
    return plain_precision(narrowest, device, "the type of its files")
