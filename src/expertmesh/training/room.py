"""Whether a run has room in memory, before anything is built: the costs are known."""

import os

import torch

from expertmesh.config.base import ranks_on_host
from expertmesh.config.family import Family
from expertmesh.config.run import RunConfig
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
    if on_host:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory //= ranks_on_host()
    else:
        memory = torch.cuda.mem_get_info(device)[1]
    each = costs.alone if costs.each is None else costs.each
    weights = each.weights_bytes if costs.each is None else each.parameters_bytes
    # where the type is still to be measured, the smaller one
    dtype = torch.bfloat16 if config.train.dtype == "auto" else getattr(torch, config.train.dtype)
    taught = teacher_bytes(config, family, num_ranks=num_ranks, compute_dtype=dtype)
    fixed = weights + each.gradients_bytes + each.optimizer_bytes + taught
    whole = fixed + costs.alone.activations_bytes // num_ranks
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
                f"too large for memory: {costs.parameters:,} parameters; {what}{share} take {needed / 2**30:,.1f} GiB, {where} has"
                f" {memory / 2**30:,.1f} GiB; {fix} (train --dry-run shows the parts)"
            )
