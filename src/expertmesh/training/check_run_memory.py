"""Check that a run fits in memory, from its predicted costs, before anything is built."""

import torch

from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.family import Family
from expertmesh.runs.check_memory import FAR, largest_size, memory_of_process
from expertmesh.training.teacher import teacher_bytes


def check_run_memory(family: Family, config: RunConfig, device: torch.device, *, num_ranks: int) -> None:
    """Check that weights, gradients, optimizer, teacher and activations fit in memory.

    Args:
        family: predicts the costs of the run; without a prediction the check is skipped.
    """
    # weights that learn are FP32 in any case; what rests under adapters has the type of the products, if unknown the
    # smaller
    given = config.train.dtype if config.adapter.rests else "float32"
    kind = "bfloat16" if given == "auto" else given
    costs = family.costs_of(config, num_ranks=num_ranks, dtype=kind)
    if costs is None:
        return
    on_host = device.type == "cpu" or config.parallel.offload
    memory = memory_of_process(device, on_host=on_host)
    # while the dtype is not chosen yet, the smaller one
    dtype = torch.bfloat16 if config.train.dtype == "auto" else getattr(torch, config.train.dtype)
    taught = teacher_bytes(config, family, num_ranks=num_ranks, compute_dtype=dtype)
    fixed = costs.memory.states_bytes + costs.memory.host_bytes + taught
    whole = costs.memory.live_bytes + costs.memory.host_bytes + taught
    rows = "micro_batch_size" if config.train.micro_batch_size else "batch_size"
    batch = (f"train.{rows}", getattr(config.train, rows))
    has_seq_len = hasattr(config.data, "seq_len")
    where = "this machine" if on_host else f"{device}"
    for needed, limit, what, fix in (
        (
            fixed,
            memory,
            "weights, gradients" + (", optimizer and teacher" if taught else " and optimizer"),
            "make the model smaller, or use more ranks",
        ),
        (
            whole,
            FAR * memory,
            "all and activations",
            f"lower {named('train.micro_batch_size')}" + (f", or {named('data.seq_len')}" if has_seq_len else ""),
        ),
    ):
        if needed > limit:
            share = "" if num_ranks == 1 else f" of each of {num_ranks} ranks"
            raise ConfigError(
                *(largest_size(family, config) if needed is fixed else batch),
                f"too large for memory: {costs.parameters:,} parameters; {what}{share} take {needed / 2**30:,.1f} "
                f"GiB, {where} has"
                f" {memory / 2**30:,.1f} GiB",
                f"{fix} (train --dry-run shows the parts)",
            )
