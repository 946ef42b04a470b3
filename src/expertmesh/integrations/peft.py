"""Expert adapters in peft's format: peft can load them onto the exported model, and `load_adapters` reads peft's."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh import lora
from expertmesh.checkpoints.peft_folder import (
    CONFIG,
    IN_HUB,
    WEIGHTS,
    AdapterFiles,
    read_adapter_files,
)
from expertmesh.checkpoints.safetensors import FileTensor, write_file
from expertmesh.config.base import expanded
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.module_adapters import Adapter

_SHARED = "shared_over_experts"
_PREFIX = "base_model.model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "lora_dropout": (0, 0.0, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "target_modules": ([], None),
}
"""Options of peft, with the values that adapters of this package support."""


def save_adapters(model: GPT, folder: str | Path) -> None:
    """Write the adapters of a model in peft's format; every rank must call, and rank 0 writes.

    An adapter that all experts share is written once per expert.

    Args:
        model: model with adapters from `expertmesh.lora.add`.
        folder: created if it does not exist.

    Raises:
        ConfigError: there are no adapters, their ranks or scalings differ, or experts are not gated (transformers has
            only gated ones).
    """
    found = lora.adapters(model)
    rank, scaling = _in_common(found)
    targets = sorted({name.rpartition(".")[2] for name in found}, reverse=True)
    tensors = {}
    for name, adapter in found.items():
        experts: Any = model.get_submodule(name.rpartition(".")[0])
        if name.endswith("w_in") and experts.shape[1] != 2:
            raise ConfigError(
                f"activation={model.config.activation}: peft's format names gated experts only; keep the adapters in a checkpoint"
            )
        e, a, b = adapter.num_experts, _whole(adapter.a), _whole(adapter.b)
        a_erK, b_eNr = (t.expand(e, -1, -1) for t in (a, b))
        theirs = _theirs(name, targets)
        tensors[f"{theirs}.lora_A.weight"] = a_erK.flatten(0, 1).contiguous()
        tensors[f"{theirs}.lora_B.weight"] = b_eNr.permute(1, 2, 0).flatten(1).contiguous()
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    folder = expanded(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shared = all(one.shared for one in found.values())
    files = [FileTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    texts = {"format": "pt", _SHARED: str(shared)}
    write_file(folder / WEIGHTS, files, iter(tensors.values()), texts)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": [],
        "target_parameters": [f"mlp.experts.{IN_HUB[name]}" for name in targets],
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def load_adapters(model: GPT, folder: str | Path) -> int:
    """Load adapters in peft's format onto a model, from peft or `save_adapters`; they are trainable.

    Args:
        model: model without adapters, of matching sizes.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Returns:
        Number of layers with adapters.

    Raises:
        ConfigError: the folder has no adapters, or unsupported ones (DoRA, on other modules, ...); names the option.
        CheckpointError: a tensor is missing, extra or of another shape; names it.
    """
    folder = expanded(folder)
    files = read_adapter_files(folder)
    _check_plain(files)
    targets = files.target_parameters()
    values, shared = files.values, files.metadata.get(_SHARED) == str(True)
    learned = [(p, p.requires_grad) for p in model.parameters()]
    count = lora.add(
        model, rank=values["r"], alpha=values["lora_alpha"], targets=targets, shared=shared, seed=0
    )
    try:
        _fill(lora.adapters(model), files.tensors, targets, folder)
    except BaseException:  # incomplete adapters are removed
        lora.remove(model)
        for parameter, requires_grad in learned:
            parameter.requires_grad_(requires_grad)
        raise
    return count


def _fill(
    found: dict[str, Adapter], tensors: dict[str, Tensor], targets: list[str], folder: Path
) -> None:
    for name, adapter in found.items():
        theirs, e, r = _theirs(name, targets), adapter.num_experts, adapter.rank
        wanted = {
            f"{theirs}.lora_A.weight": (e * r, adapter.a.shape[2]),
            f"{theirs}.lora_B.weight": (adapter.b.shape[1], r * e),
        }
        for key, shape in wanted.items():
            if key not in tensors:
                raise CheckpointError(f"{folder}: has no tensor {key}; save the adapters again")
            if tuple(tensors[key].shape) != shape:
                raise CheckpointError(
                    f"{folder}: {key} has shape {tuple(tensors[key].shape)} and must have {shape}; use the model that they are of"
                )
        a, b = map(tensors.pop, wanted)
        with torch.no_grad():
            adapter.a.copy_(a.unflatten(0, (e, r))[: len(adapter.a)])
            adapter.b.copy_(b.unflatten(1, (r, e)).permute(2, 0, 1)[: len(adapter.b)])
    if tensors:
        raise CheckpointError(
            f"{folder}: has a tensor {min(tensors)} that this model has no place for; use the model that they are of"
        )


def _check_plain(files: AdapterFiles) -> None:
    for name, allowed in _PLAIN.items():
        if files.values.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"{files.folder}: {name}={files.values[name]!r}: adapters of expertmesh have only {allowed[0]!r}; train them without"
            )


def _theirs(name: str, targets: list[str]) -> str:
    """peft's name of the wrapper of layers.0.moe.experts.w_in; if both weights are adapted, down_proj's wrapper is the outer one."""
    path, _, target = name.rpartition(".")
    where = _PREFIX + path.replace(".moe.experts", ".mlp.experts")
    return f"{where}.base_layer" if target == "w_in" and len(targets) == 2 else where


def _in_common(found: dict[str, Adapter]) -> tuple[int, float]:
    kinds = {(one.rank, one.scaling) for one in found.values()}
    if len(kinds) > 1:
        raise ConfigError(
            f"adapters of {len(kinds)} ranks or scalings: peft's format has one for all; use one"
        )
    return next(iter(kinds))


def _whole(factor: Tensor) -> Tensor:
    whole = factor.full_tensor() if isinstance(factor, DTensor) else factor
    return whole.detach().cpu()
