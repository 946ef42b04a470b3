"""Layout and costs of a run as its configuration stands, without a search."""

from dataclasses import replace

from expertmesh.config.cluster import Cluster
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.search import Candidate, Problem


def layout_of(config: GPTRunConfig, num_ranks: int) -> RankLayout | None:
    """Layout of a run on `num_ranks`; None: its degrees or its batch do not fit them.

    Args:
        config: configuration of the run.
        num_ranks: number of ranks of the world.
    """
    parallel, train = config.parallel, config.train
    copies, tp = parallel.dp_replicate_degree, parallel.tp_degree
    if num_ranks % (copies * tp):
        return None
    W, groups = num_ranks // copies, num_ranks // tp
    if train.samples_per_pass % groups:
        return None
    slices = parallel.es_degree or 1
    route = parallel.ep_degree[0] * slices if parallel.ep_degree else parallel.route_degree or W
    if W % route:
        return None
    checkpointing = "full" if train.activation_checkpointing else "none"
    if config.model.moe.recompute_h and checkpointing == "none":
        checkpointing = "experts"
    return RankLayout(
        num_ranks,
        tp_degree=tp,
        route_degree=route,
        dp_replicate_degree=copies,
        zero_stage=parallel.zero_stage,
        offload=parallel.offload,
        checkpointing=checkpointing,  # type: ignore[arg-type]
        micro_batch=train.samples_per_pass // groups,
        accumulation=train.batch_size // train.samples_per_pass,
        overlap_degree=parallel.overlap_degree,
        all_to_all="hierarchical" if parallel.all_to_all == "hierarchical" else "flat",
    )


def as_configured(config: GPTRunConfig, problem: Problem) -> Candidate | None:
    """The configured layout of a run with its costs; None: it cannot run on the cluster's devices.

    Args:
        config: configuration of the run.
        problem: problem with the cluster; the run's batch and sequence length replace its own.
    """
    cluster: Cluster = problem.cluster
    layout = layout_of(config, cluster.num_gpus)
    if layout is None:
        return None
    work = replace(problem.work, seq_len=config.data.seq_len)
    return Candidate(replace(problem, work=work, batch=config.train.batch_size), layout)
