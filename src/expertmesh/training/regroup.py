"""Pruning of a trained model's experts by their use (`prune`), and union of two models' experts (`join`).

Both are from Z-code M3 (Kim et al. 2021, arXiv 2109.10465, "expert pruning" and "aggregation of experts"). They write a
new run, which can be used directly; a little more training (`train.init_from`) improves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from expertmesh.config.base import dotted_values
from expertmesh.config.output_file import new_folder
from expertmesh.config.run import RunConfig
from expertmesh.config.values import WHOLE, Number
from expertmesh.data.data_progress import notes_known
from expertmesh.errors import ConfigError, named
from expertmesh.models.task import Data, Task
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import RoutingStats
from expertmesh.runs.data_paths import with_data
from expertmesh.runs.open import LoadedModel, open_model
from expertmesh.runs.precision import Precision
from expertmesh.runs.run_dir import TOKENIZER, Run, load_run
from expertmesh.text.format import extras_of
from expertmesh.training.evaluate import evaluate
from expertmesh.training.init_from import save_as_run
from expertmesh.training.state import check_same_data, read_run_state
from expertmesh.training.threads import threads_of_calls

_ROWS = 64
"""Approximate tokens or patches of a sample, for which the number of threads is chosen."""
_OF_TRAINING = (
    "dropout", "drop_path", "label_smoothing", "init_std", "moe.input_jitter", "moe.input_dropout", "moe.expert_output_masking",  # noqa: E501
    "moe.balance_loss", "moe.balance_loss_scope", "moe.aux_loss_weight", "moe.z_loss_weight", "moe.recompute_h",
)  # fmt: skip
"""Model options that have no effect after training."""


@dataclass(frozen=True)
class Regrouped:
    """Run with another number of experts."""

    path: Path  # run directory
    num_experts: tuple[int, ...]  # experts of each MoE layer
    # for each MoE layer, share of the validation data's choices that went to the kept experts; None: all are kept
    kept: tuple[float, ...] | None = None


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """MoE layers of a model by name, in its order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}


def count_choices(
    task: Task,
    model: nn.Module,
    data: Data,
    *,
    batch_size: int,
    max_samples: int | None,
    precision: Precision,
) -> dict[str, Tensor]:
    """Number of times that validation data choose each expert, before dropping.

    Args:
        task: task of the model.
        model: whole model with experts.
        data: data of the task.
        batch_size: samples per forward pass.
        max_samples: maximum number of samples, evenly spread; None: all.
        precision: device and dtype.

    Returns:
        By name of each MoE layer (E,) int64 counts, on the CPU.
    """
    counts: dict[str, Tensor] = {}

    def watch(name: str, layer: MoELayer) -> RemovableHandle:
        counts[name] = torch.zeros(layer.num_experts, dtype=torch.int64)

        def add(module: nn.Module, args: Any, output: tuple[Tensor, RoutingStats]) -> None:
            counts[name] += output[1].num_tokens_per_expert_E.cpu()

        return layer.register_forward_hook(add)

    handles = [watch(name, layer) for name, layer in moe_layers(model).items()]
    try:
        evaluate(task, model, data, batch_size=batch_size, max_samples=max_samples, precision=precision)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def prune(
    source: str | Path,  # a run directory; its data must be available
    target: str | Path,  # a run directory that does not exist yet
    *,
    keep: int,  # experts of each layer to keep; a layer with fewer keeps all
    max_samples: int | None = None,  # number of validation samples, evenly spread; None: all
    data_path: Sequence[str] | None = None,  # where the run's data are now; None: where they were
) -> Regrouped:
    """Write a run with the experts of each MoE layer that a run's validation data use most, and their router rows."""
    for option, value in (("keep", keep), ("max_samples", max_samples)):
        Number(1, fix="give one", types=WHOLE, optional=True).check(option, value)
    target = new_folder("to", target)
    run = with_data(load_run(source), data_path)
    data_key = read_run_state(run.checkpoint)["data_key"]
    if not data_key:
        raise ConfigError(
            f"run {run.path}: came from elsewhere, without data on which the use of its experts could be counted; "
            f"train a run that begins with it ({named('train.init_from')}) on yours, and name that one"
        )
    trained = open_model(run)
    layers = checked_layers(run, trained)
    if any(layer.options.router == "expert_choice" for layer in layers.values()):
        raise ConfigError(
            f"run {run.path}: has {named('model.moe.router', 'expert_choice')}, whose experts are all used alike, so "
            "that none is used least; name a run whose tokens choose"
        )
    top_k = max(layer.top_k for layer in layers.values())
    if keep < top_k:
        raise ConfigError("keep", keep, f"must be at least the {top_k} of a token", f"use {top_k}")
    most = max(layer.num_experts for layer in layers.values())
    if keep >= most:
        raise ConfigError("keep", keep, f"must be below the {most} that there are", "lower it")
    train = run.config.train
    with notes_known():
        data = trained.task.prepare()
    check_same_data(data_key, data, where=run.checkpoint)
    num_rows = _ROWS * train.samples_per_pass
    with threads_of_calls(trained.model, trained.precision, num_rows=num_rows):
        counts = count_choices(
            trained.task,
            trained.model,
            data,
            batch_size=train.samples_per_pass,
            max_samples=max_samples,
            precision=trained.precision,
        )
    chosen = {
        name: count_E.argsort(descending=True, stable=True)[:keep].sort().values for name, count_E in counts.items()
    }
    of_expert = _tensors_of_experts(trained.model)
    tensors = {
        name: tensor[chosen[of_expert[name]].to(tensor.device)] if name in of_expert else tensor
        for name, tensor in trained.model.state_dict().items()
    }
    sizes = tuple(len(kept_k) for kept_k in chosen.values())
    _write(run, tensors, target, sizes, recipe=f"the most used experts of {run.path.name}")
    kept = tuple(float(counts[name][kept_k].sum() / counts[name].sum().clamp(min=1)) for name, kept_k in chosen.items())
    return Regrouped(target, sizes, kept)


def join(first: str | Path, second: str | Path, target: str | Path) -> Regrouped:
    """Write a run with the experts of two: experts and router rows are concatenated, all other weights averaged.

    Args:
        second: a run directory of the same model, vocabulary and classes; best with the same initial weights.
        target: a run directory that does not exist yet.
    """
    target = new_folder("to", target)
    run, other = load_run(first), load_run(second)
    _check_alike(run, other)
    trained, added = open_model(run), open_model(other)
    layers = checked_layers(run, trained)
    of_expert = _tensors_of_experts(trained.model)
    ours, theirs = (
        {name: tensor.cpu() for name, tensor in found.model.state_dict().items()} for found in (trained, added)
    )
    tensors = {}
    for name, tensor in ours.items():
        if name in of_expert:
            tensors[name] = torch.cat((tensor, theirs[name]))
        else:
            tensors[name] = (tensor + theirs[name]) / 2 if tensor.is_floating_point() else tensor
    sizes = tuple(2 * layer.num_experts for layer in layers.values())
    recipe = f"the experts of {run.path.name} and {other.path.name}"
    _write(run, tensors, target, sizes, recipe=recipe)
    return Regrouped(target, sizes)


def checked_layers(run: Run, trained: LoadedModel) -> dict[str, MoELayer]:
    """MoE layers of a run's model by name, if experts can be removed and added."""
    layers = moe_layers(trained.model)
    if not layers or not hasattr(run.config.model, "moe"):
        raise ConfigError(f"run {run.path}: its model has no experts; name one that has")
    for layer in layers.values():
        options = layer.options
        if options.router == "hash" or options.num_expert_groups > 1:
            what = "router=hash" if options.router == "hash" else "num_expert_groups"
            raise ConfigError(
                f"run {run.path}: has model.moe.{what}, which fixes who its experts are; use a model without it"
            )
        if layer.grouped is not None and layer.grouped.format != "dense":
            raise ConfigError(f"run {run.path}: its experts are {layer.grouped.format}; name the run they were made of")
        if layer.grouped is None:
            raise ConfigError(
                f"run {run.path}: its experts are modules of their own ({type(layer.experts).__name__}), not rows of "
                "one tensor;"
                " name a run whose MoE layers have num_experts and hidden_dim only"
            )
    return layers


def _check_alike(run: Run, other: Run) -> None:
    """Check that two runs have the same model."""
    if run.family.name != other.family.name:
        raise ConfigError(
            f"run {other.path}: is of family {other.family.name} and {run.path} of {run.family.name}; name two of one"
        )
    may_differ = {*run.family.free, *(f"model.{name}" for name in _OF_TRAINING)}
    ours, theirs = (dotted_values(found.config.model.model_dump(), "model") for found in (run, other))
    for name in sorted({*ours, *theirs} - may_differ):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"run {other.path}: its {name} is {theirs.get(name)} and that of {run.path} {ours.get(name)}; name "
                "two runs of"
                " one model"
            )
    for name in run.family.files:
        if (run.path / name).read_bytes() != (other.path / name).read_bytes():
            raise ConfigError(f"run {other.path}: its {name} is not that of {run.path}; name two runs on the same data")


def _tensors_of_experts(model: nn.Module) -> dict[str, str]:
    """Names of tensors whose first axis is E, mapped to the name of their layer."""
    found = {}
    names = list(model.state_dict())
    for layer_name, layer in moe_layers(model).items():
        is_cosine = layer.options.router == "cosine"
        # a cosine router's projection has no row per expert
        rows = ("expert_embeddings",) if is_cosine else ("proj.weight", "proj.bias")
        by_expert = {"expert_bias_E", *(f"router.{row}" for row in rows)}
        for name in names:
            own = name.removeprefix(f"{layer_name}.")
            if own != name and (own in by_expert or own.startswith("experts.")):
                found[name] = layer_name
    return found


def _write(run: Run, tensors: Mapping[str, Tensor], target: Path, sizes: tuple[int, ...], *, recipe: str) -> None:
    counts = sizes[:1] if len(set(sizes)) == 1 else sizes
    config: RunConfig = run.config.updated(
        {
            "model.moe.num_experts": counts,
            "train.run_dir": str(target),
            "train.init_from": None,
            "train.branch_from": None,
        }
    )
    dtype = next(tensor.dtype for name, tensor in tensors.items() if name.endswith("w_in"))
    model: nn.Module = run.family.open_task(config).builder.build(device="cpu", dtype=dtype)
    model.load_state_dict(dict(tensors))
    files = {name: run.path / name for name in run.family.files}
    if TOKENIZER in files:
        files |= extras_of(files[TOKENIZER])
    save_as_run(model, config, recipe=recipe, files={**files, **run.kept_arithmetic})
