"""Precision and threads of a run, chosen once and saved with it."""

from dataclasses import replace

import torch

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.config.run import RunConfig
from expertmesh.models.family import Family
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.arithmetic import write_arithmetic
from expertmesh.runs.precision import Precision, is_exact, settle_precision
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.threads import Threads, settle_threads


def settle(
    family: Family, config: RunConfig, run_dir: RunDir, ranks: Ranks
) -> tuple[Precision, Threads | None]:
    """Precision and number of threads of a run, both saved with it; threads are None on a GPU unless given."""
    record, given = run_dir.arithmetic, config.parallel.num_threads
    goes_on = ranks.on_rank0(lambda: bool(list_checkpoints(run_dir.checkpoints)))
    # by the whole step's products, which are the same on any number of ranks
    asked = {"products": family.products_of(config), "is_exact": is_exact(config.model_dump())}
    precision = ranks.on_rank0(lambda: settle_precision(config.train, record=record, **asked))
    if precision.device.type != "cpu" and given is None:
        return precision, None
    began_with = precision.arithmetic.threads
    threads = settle_threads(
        ranks,
        family.products_of(config, num_parts=ranks.num_row_parts),
        given=given,
        # older runs did not save it and used torch's number
        began_with=torch.get_num_threads() if goes_on and began_with is None else began_with,
    )
    kept = replace(precision.arithmetic, threads=threads.count)
    ranks.on_rank0(lambda: write_arithmetic(record, kept))
    return precision, threads
