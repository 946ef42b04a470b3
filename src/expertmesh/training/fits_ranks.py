"""Check that a run fits the number of ranks."""

from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.task import Task
from expertmesh.parallel.ranks import Ranks
from expertmesh.training.threads import check_threads

_OF_SEVERAL = (
    "dp_replicate_degree",
    "dp_shard_degree",
    "tp_degree",
    "ep_degree",
    "es_degree",
    "route_degree",
    "overlap_degree",
    "replicated_experts",
    "adaptive",
    "all_to_all",
    "expert_order",
)
"""Options that have no effect on one rank."""


def check_ranks(task: Task, ranks: Ranks) -> None:
    """Check that a run fits its ranks."""
    parallel, train_config = task.config.parallel, task.config.train
    if ranks.size > 1 and train_config.device.startswith("cuda:"):
        raise ConfigError(
            f"{named('train.device', train_config.device)} on {ranks.size} ranks: each takes the GPU of its number on "
            f"its host; use {named('train.device', 'cuda')}"
        )
    if ranks.size == 1:
        _check_alone(parallel)
    check_threads(parallel.num_threads)
    task.builder.check(ranks.size)
    size = train_config.samples_per_pass
    if size % (parts := ranks.num_row_parts):
        name = "batch_size" if size == train_config.batch_size else "micro_batch_size"
        among = f"the {ranks.size} ranks"
        if parallel.tp_degree > 1:
            among = f"{parts} groups of {parallel.tp_degree} ranks"
        near = max(size // parts, 1) * parts
        raise ConfigError(f"train.{name}", size, f"must divide evenly over {among}", f"nearest below: {near}")


def _check_alone(parallel: ParallelConfig) -> None:
    """Raise ConfigError for options that need several ranks; the message lists the values for one rank."""
    wanted = {}
    for name in _OF_SEVERAL:
        value, usual = getattr(parallel, name), type(parallel).model_fields[name].default
        degree = max(value, default=None) if isinstance(value, tuple) else value
        idle = (None, usual, 1) if name.endswith("_degree") else (usual,)
        if degree not in idle:
            wanted[name] = (degree, usual if usual not in (None, ()) else "none")
    if not wanted:
        return
    name, (degree, _) = next(iter(wanted.items()))
    alone = ", ".join(named(f"parallel.{n}", usual) for n, (_, usual) in wanted.items())
    raise ConfigError(
        f"parallel.{name}",
        degree,
        "there is one rank",
        f"start more with torchrun --nproc-per-node N -m expertmesh train ..., or, to go on with one, give {alone}",
    )
