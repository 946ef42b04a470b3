"""Factors of a run's adapters and their numbers of parameters, from the model's specification, and their
description."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from expertmesh.config.adapter import AdapterConfig
from expertmesh.spec.adapter_targets import check_targets, kind_of, rank_of
from expertmesh.spec.model_spec import ModelSpec, Parameter, num_elements, parameter


def factors(config: AdapterConfig, spec: ModelSpec, *, num_tokens: int = 0) -> Iterator[Parameter]:
    """Factors A and B of each adapter, as parameters that learn; experts that share an adapter have its factors once.
    Then the rows of `num_tokens` added tokens."""
    for one in map(spec.by_name.__getitem__, check_targets(config, spec)):
        *rows, columns = one.shape
        rank, part, experts = rank_of(config, one, spec), one.part, dict[str, Any]()
        if one.is_expert:
            each, *rows = rows
            experts, part = ({}, "adapters") if config.shared else ({"expert": each}, part)
        of_a: dict[str, Any] = {"rank": rank, "model": columns}
        of_b: dict[str, Any] = {"rows": math.prod(rows), "rank": rank}
        for name, sizes in (("a", of_a), ("b", of_b)):
            factor = parameter(f"{one.name}.{name}", "matrix", part, **experts, **sizes)
            yield replace(factor, layer=one.layer)
    for table in ("embedding", "output") if num_tokens else ():
        if (of := spec.by_name.get(f"{table}.weight")) is not None:
            yield parameter(f"token_rows.{table}.rows", "embedding", of.part, token=num_tokens, model=of.shape[-1])


def factor_counts(config: AdapterConfig, spec: ModelSpec, *, num_tokens: int = 0) -> Counter[str]:
    """Numbers of parameters of the factors, by kind of the adapted ones; see `factors`."""
    found = Counter[str]()
    for one in factors(config, spec, num_tokens=num_tokens):
        found[kind_of(one.name.rpartition(".")[0]) or "new tokens"] += one.num_elements
    return found


def adapter_text(config: AdapterConfig, spec: ModelSpec, *, num_tokens: int = 0) -> str:
    """Description of a run's adapters: numbers of parameters by kind, ranks and scales, and what becomes of routers."""
    counts = factor_counts(config, spec, num_tokens=num_tokens)
    total, whole = sum(counts.values()), num_elements(spec)
    parts = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
    text = (
        f"{total:,} parameters beside {whole:,} frozen ones: {parts}; rank {config.rank}, scale "
        f"{config.scaling(config.rank):g}"
    )
    if "experts" in counts:
        rank = config.expert_rank_of(spec.experts_per_token)
        each = "for all experts of a layer" if config.shared else "for each expert"
        text += f", {each} rank {rank}, scale {config.scaling(rank):g}"
    if not spec.num_experts:
        return text
    if config.routers_rest:
        return f"{text}; routers frozen, no balance loss"
    return f"{text}; routers learn, with their balance loss"
