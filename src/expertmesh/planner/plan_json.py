"""A plan as plain values, for JSON: what the table shows, with bytes, seconds and dollars as numbers."""

from dataclasses import asdict
from typing import Any

from expertmesh.planner.search import Candidate
from expertmesh.planner.search_result import ERROR_BAR, MEMORY_BAR, SearchResult
from expertmesh.planner.table import layout_text, time_parts


def as_json(plan: SearchResult) -> dict[str, Any]:
    """Values of a plan of training.

    Returns:
        Names with units: `_bytes`, `_s`, `_usd`; `best`, `safer` and `front` are layouts with their costs.

    Example:
        >>> import expertmesh as em
        >>> from expertmesh.planner.plan_json import as_json
        >>> found = as_json(em.plan("gpt-moe-1b", cluster="h100x8"))
        >>> found["best"]["layout"]["num_ranks"], found["command"].split()[0]
        (8, 'torchrun')
    """
    problem, sizes = plan.problem, plan.problem.sizes
    safer = plan.safer
    return {
        "model": plan.model.name,
        "parameters": sizes.num_parameters,
        "active_parameters": sizes.active_parameters,
        "cluster": problem.cluster.model_dump(mode="json"),
        "goal": plan.goal,
        "workload": asdict(problem.work),
        "tokens_per_step": problem.batch * problem.work.seq_len,
        "training_tokens": plan.model.train_tokens,
        "training_s": plan.train_s,
        "device_hours": plan.gpu_hours,
        "price_usd": list(plan.usd),
        "time_error_bar": list(ERROR_BAR),
        "memory_error_bar": list(MEMORY_BAR),
        "best": _layout(plan.best),
        "safer": None if safer is None else _layout(safer),
        "front": [_layout(one) for one in plan.front],
        "flags": plan.flags,
        "command": plan.command,
        "guesses": list(plan.guesses),
    }


def _layout(one: Candidate) -> dict[str, Any]:
    memory, seconds = one.memory, one.seconds
    return {
        "words": layout_text(one),
        "layout": asdict(one.layout),
        "tokens_per_s": one.tokens_per_s,
        "utilisation": one.utilisation,
        "step_s": seconds.total_s,
        "time_s": dict(time_parts(seconds)),
        "device_bytes": memory.device_bytes,
        "host_bytes": memory.host_bytes,
        "filled": one.filled,
        "memory_bytes": dict(memory.parts),
    }
