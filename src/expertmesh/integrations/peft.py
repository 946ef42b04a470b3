"""Adapters in peft's format: peft can load them onto the exported model, and `load_adapters` reads peft's."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh import lora
from expertmesh.checkpoints.peft_folder import read_adapter_files, read_factors
from expertmesh.checkpoints.peft_writing import (
    SHARED,
    ExpertLayout,
    TrainedAdapter,
    write_peft_folder,
)
from expertmesh.config.base import expanded
from expertmesh.models.gpt.model import GPT


def save_adapters(
    model: GPT,
    folder: str | Path,
    *,
    base: str | None = None,
    expert_layout: ExpertLayout = "fused",
) -> None:
    """Write the adapters of a model in peft's format; every rank must call, and rank 0 writes.

    An adapter that all experts share is written once per expert.

    Args:
        model: model with adapters from `expertmesh.lora.add`.
        folder: created if it does not exist.
        base: the model that peft loads them onto, `base_model_name_or_path`.
        expert_layout: adapters of experts on transformers' tensors of all experts (fused), or on each expert's matrices
            (per-expert), for vLLM.

    Raises:
        ConfigError: there are no adapters, or experts are not gated (transformers has only gated ones).
    """
    found = {
        name: TrainedAdapter(_whole(one.a), _whole(one.b), one.scaling) for name, one in lora.adapters(model).items()
    }
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    folder = expanded(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_peft_folder(folder, model.config, found, base=base, layout=expert_layout)


def load_adapters(model: GPT, folder: str | Path) -> int:
    """Load adapters in peft's format onto a model, from peft or `save_adapters`; they are trainable.

    Several modules that are one matrix here become one adapter, whose rank is the sum of their ranks, unless they have
    the same first factor.

    Args:
        model: model without adapters, of matching sizes.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Returns:
        Number of modules with adapters.

    Raises:
        ConfigError: the folder has no adapters, or unsupported ones (DoRA, on other modules, ...); names the option.
        CheckpointError: a tensor is missing, extra or of another shape; names it.
    """
    files = read_adapter_files(expanded(folder))
    found = read_factors(files, model.config)
    shared = files.metadata.get(SHARED) == str(True)
    sizes = {name: lora.Size(one.a_erK.shape[1], one.scaling) for name, one in found.items()}
    count = lora.attach(model, sizes, shared=shared, seed=0)
    for name, adapter in lora.adapters(model).items():
        with torch.no_grad():
            for own, theirs in ((adapter.a, found[name].a_erK), (adapter.b, found[name].b_eNr)):
                given = theirs[0] if adapter.shared else theirs
                own.copy_(given.view(own.shape))
    return count


def _whole(factor: Tensor) -> Tensor:
    whole = factor.full_tensor() if isinstance(factor, DTensor) else factor
    return whole.detach().cpu()
