"""Whether a run has room in memory, before anything is built: the costs are known."""

import os
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from expertmesh.config.base import option_names, ranks_on_host
from expertmesh.config.family import Family
from expertmesh.config.run import ParallelConfig, RunConfig
from expertmesh.errors import ConfigError, named
from expertmesh.training.teacher import teacher_bytes

# Activations are an estimate, and a system may swap: refuse only what is far beyond.
_FAR = 4


def check_room(family: Family, config: RunConfig, device: torch.device, *, num_ranks: int) -> None:
    """Refuse a model whose weights, gradients, optimiser and teacher are larger than the memory that there is.

    Args:
        family: says what the run costs; one that cannot tell is let through.
        config: the run; its degrees fit the ranks.
        device: of the computation.
        num_ranks: of the world.

    Raises:
        ConfigError: it is too large, or its teacher's configuration is unreadable.
    """
    costs = family.costs_of(config, num_ranks=num_ranks, dtype="float32")
    if costs is None:
        return
    on_host = device.type == "cpu" or config.parallel.offload
    memory = _memory(device, on_host=on_host)
    each = costs.alone if costs.each is None else costs.each
    weights = each.weights_bytes if costs.each is None else each.parameters_bytes
    # where the type is still to be measured, the smaller one
    dtype = torch.bfloat16 if config.train.dtype == "auto" else getattr(torch, config.train.dtype)
    taught = teacher_bytes(config, family, num_ranks=num_ranks, compute_dtype=dtype)
    fixed = weights + each.gradients_bytes + each.optimizer_bytes + taught
    whole = fixed + costs.alone.activations_bytes // num_ranks
    rows = "micro_batch_size" if config.train.micro_batch_size else "batch_size"
    batch = (f"train.{rows}", getattr(config.train, rows))
    has_seq_len = hasattr(config.data, "seq_len")
    where = "this machine" if on_host else f"{device}"
    for needed, limit, what, fix in (
        (
            fixed,
            memory,
            "weights, gradients" + (", optimiser and teacher" if taught else " and optimiser"),
            "make the model smaller, or use more ranks",
        ),
        (
            whole,
            _FAR * memory,
            "all and activations",
            f"lower {named('train.micro_batch_size')}"
            + (f", or {named('data.seq_len')}" if has_seq_len else ""),
        ),
    ):
        if needed > limit:
            share = "" if num_ranks == 1 else f" of each of {num_ranks} ranks"
            raise ConfigError(
                *(_largest_size(family, config) if needed is fixed else batch),
                f"too large for memory: {costs.parameters:,} parameters; {what}{share} take {needed / 2**30:,.1f} GiB, {where} has"
                f" {memory / 2**30:,.1f} GiB",
                f"{fix} (train --dry-run shows the parts)",
            )


def check_weights(
    family: Family, config: RunConfig, device: torch.device, *, num_ranks: int
) -> None:
    """Refuse a trained model whose weights alone are far beyond the memory that there is, before it is built.

    Args:
        family: says what the model costs; one that cannot tell is let through.
        config: of its run.
        device: of the computation.
        num_ranks: that may share the weights.

    Raises:
        ConfigError: it is too large; names the size that makes it so.
    """
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    costs = family.costs_of(alone, num_ranks=1, dtype="float32")
    if costs is None:
        return
    memory = _memory(device, on_host=device.type == "cpu")
    needed = costs.parameters * torch.bfloat16.itemsize // num_ranks
    if needed > _FAR * memory:
        raise ConfigError(
            *_largest_size(family, config),
            f"too large for memory: {costs.parameters:,} parameters take {needed / 2**30:,.1f} GiB in BF16, and there are"
            f" {memory / 2**30:,.1f} GiB",
            "if the file is damaged, restore it from a copy; else use more ranks or a larger machine",
        )


def _memory(device: torch.device, *, on_host: bool) -> int:
    """Bytes for this process."""
    if not on_host:
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_on_host()


def _largest_size(family: Family, config: RunConfig) -> tuple[str, Any]:
    """The option of the model without which it is smallest, and its value: it has its default in turn."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    usual = family.config()
    found = []
    for name in option_names(type(config)):
        value, default = attrgetter(name)(config), attrgetter(name)(usual)
        if not name.startswith("model.") or value == default or default is None:
            continue
        with suppress(ConfigError):  # sizes depend on one another
            costs = family.costs_of(alone.updated({name: default}), num_ranks=1, dtype="float32")
            found.append((costs.parameters, name, value))
    _, name, value = min(found, default=(0, "model", "as it is"))
    return name, value
