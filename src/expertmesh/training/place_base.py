"""A model whose weights rest under adapters, in the storage of `base.storage`."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from expertmesh.checkpoints.rounded import ExpertFormat
from expertmesh.config.frozen_base import GROUPED, QUANTIZED, FrozenBaseConfig
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.task import Task
from expertmesh.moe.module_adapters import reset_adapters
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import Precision
from expertmesh.runs.quantized import PackedExperts, put_quantized
from expertmesh.runs.run_dir import Run


def packed_storage(base: FrozenBaseConfig, run: Run) -> dict[str, Any]:
    """Options of the base, by dotted names, that follow from a folder whose experts are packed."""
    found = run.packed_format()
    if found is None:
        return {}
    form, group_size = found
    if base.storage not in ("auto", form):
        if not run.is_quantized:
            return {}
        fix = "leave it out, or begin with the model that it was made of"
        raise ConfigError("base.storage", base.storage, f"{run.path} has experts in {form}", fix)
    group = {"base.group_size": group_size} if form in GROUPED else {}
    return {"base.storage": form, **group}


def with_format(begin: Run | None, config: RunConfig, precision: Precision) -> Run | None:
    """The folder that a run begins with; under adapters its experts are read in the format of the base."""
    base, dtype = config.base, precision.compute_dtype
    if begin is None or not config.adapter.rests:
        return begin
    if base.storage == "bfloat16" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "base.storage",
            base.storage,
            f"products are in {name}",
            f"use {named('train.dtype', 'bfloat16')}, or {named('base.storage', name)}",
        )
    if base.storage not in QUANTIZED or begin.is_quantized:
        return begin
    return replace(begin, rounds=ExpertFormat(base.storage, dtype, base.group_size))


def place_model(task: Task, begin: Run | None, precision: Precision, ranks: Ranks) -> nn.Module:
    """The model of a run, spread over the ranks if there are several.

    Under adapters it has no values yet, and its full matrices no memory: what rests has the type of the products, or is
    packed, and routers have FP32.

    Args:
        begin: the folder that it begins with, as `with_format` returned it; None: it has none, or goes on whole.
    """
    builder, place = task.builder, precision.device
    config: RunConfig = task.config
    if begin is None or not config.adapter.rests:
        return builder.place(device=place, dtype=precision.master_dtype, ranks=ranks)
    weights, world = begin.open_weights(), ranks.world

    def prepare(model: nn.Module) -> None:
        if isinstance(weights, PackedExperts):
            put_quantized(model, weights)
        if world is not None:
            builder.spread(model, world)

    is_wide = config.base.storage == "float32" or world is not None
    model = builder.build_spread(
        prepare,
        device=place,
        dtype=precision.master_dtype if is_wide else precision.compute_dtype,
        offload=config.parallel.offload,
        is_read_next=True,
    )
    reset_adapters(model, config.train.seed)
    return model
