"""Check that a trained model fits into memory, by its known costs, before it is built."""

import os
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from expertmesh.config.base import option_names
from expertmesh.config.launched import ranks_on_host
from expertmesh.config.run import ParallelConfig, RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family

FAR = 4
"""Ratio of estimated need to memory beyond which a model is refused; less may still run, since a system may swap."""


def check_weights(family: Family, config: RunConfig, device: torch.device, *, num_ranks: int) -> None:
    """Refuse a trained model whose weights alone are far beyond the memory, before it is built."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    costs = family.costs_of(alone, num_ranks=1, dtype="float32")
    if costs is None:
        return
    memory = memory_of_process(device, on_host=device.type == "cpu")
    needed = costs.parameters * torch.bfloat16.itemsize // num_ranks
    if needed > FAR * memory:
        raise ConfigError(
            *largest_size(family, config),
            f"too large for memory: {costs.parameters:,} parameters take {needed / 2**30:,.1f} GiB in BF16, and there "
            "are"
            f" {memory / 2**30:,.1f} GiB",
            "if the file is damaged, restore it from a copy; else use more ranks or a larger machine",
        )


def memory_of_process(device: torch.device, *, on_host: bool) -> int:
    """Bytes of memory for this process: the device's, or its share of the host's."""
    if not on_host:
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_on_host()


def largest_size(family: Family, config: RunConfig) -> tuple[str, Any]:
    """(name, value) of the model's option whose default would shrink it most."""
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
