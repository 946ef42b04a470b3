"""The layout of a run as its configuration stands, with its costs, without a search."""

from dataclasses import replace

from expertmesh.costs.rank_layout import RankLayout, layout_of
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.planner.search import Candidate, Problem


def configured_layout(config: GPTRunConfig, num_ranks: int) -> RankLayout | None:
    """Layout of a run on `num_ranks`; None: its degrees or its batch do not fit them."""
    found = layout_of(
        config,
        num_ranks,
        experts=gpt_spec(config.model).num_experts,
        recomputes_h=config.model.moe.recompute_h,
    )
    W = found.shard_degree * found.tp_degree
    fits = found.dp_replicate_degree * W == num_ranks
    fits &= found.dp_degree * found.micro_batch == config.train.samples_per_pass
    routes = found.layer_routes or (found.route_degree,)
    return found if fits and not any(W % route for route in routes) else None


def as_configured(config: GPTRunConfig, problem: Problem) -> Candidate | None:
    """The configured layout of a run with its costs; None: it cannot run on the cluster's devices."""
    layout = configured_layout(config, problem.cluster.num_gpus)
    if layout is None:
        return None
    work = replace(problem.work, seq_len=config.data.seq_len)
    return Candidate(replace(problem, work=work, batch=config.train.batch_size), layout)
