"""Numbers of parameters of a run's adapters, from the model's specification, and their description."""

import math
from collections import Counter

from expertmesh.config.adapter import AdapterConfig
from expertmesh.spec.adapter_targets import check_targets, kind_of
from expertmesh.spec.model_spec import ModelSpec, num_elements


def factor_counts(config: AdapterConfig, spec: ModelSpec) -> Counter[str]:
    """Numbers of parameters of the factors, by kind of what they adapt.

    Args:
        config: options of the adapters.
        spec: the model.

    Raises:
        ConfigError: a target is not in the model.
    """
    found = Counter[str]()
    for name in check_targets(config, spec):
        shape, experts, rank = list(spec.by_name[name].shape), 1, config.rank
        if spec.by_name[name].is_expert:
            experts, *shape = shape
            rank = config.expert_rank_of(spec.experts_per_token)
            experts = 1 if config.shared else experts
        *rows, columns = shape
        found[str(kind_of(name))] += experts * rank * (math.prod(rows) + columns)
    return found


def adapter_text(config: AdapterConfig, spec: ModelSpec) -> str:
    """Description of a run's adapters: numbers of parameters by kind, ranks and scales, and what becomes of routers."""
    counts = factor_counts(config, spec)
    total, whole = sum(counts.values()), num_elements(spec)
    parts = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
    text = f"{total:,} parameters beside {whole:,} that rest: {parts}; rank {config.rank}, scale {config.scaling(config.rank):g}"
    if "experts" in counts:
        rank = config.expert_rank_of(spec.experts_per_token)
        each = "for all experts of a layer" if config.shared else "for each expert"
        text += f", {each} rank {rank}, scale {config.scaling(rank):g}"
    if not spec.num_experts:
        return text
    if config.routers_rest:
        return f"{text}; routers rest, no balance loss"
    return f"{text}; routers learn, with their balance loss"
