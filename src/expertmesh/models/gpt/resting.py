"""Sizes of a GPT in a run: with adapters, which of its parameters rest and how they are kept, and the adapters' factors."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from expertmesh.config.frozen_base import QUANTIZED
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.sizes import GPTSizes, sizes_of
from expertmesh.spec.adapter_targets import check_targets
from expertmesh.spec.model_spec import ModelSpec, Parameter, parameter
from expertmesh.spec.resting import Resting


def sizes_of_run(config: GPTRunConfig) -> GPTSizes:
    """Sizes of a run's model; those of `sizes_of` where all of it learns.

    Args:
        config: configuration of the run.
    """
    sizes, adapter = sizes_of(config.model), config.adapter
    if not adapter.rests:
        return sizes
    adapted = [sizes.spec.by_name[name] for name in check_targets(adapter, sizes.spec)]
    resting = (replace(one, rests=_rests(one, config)) for one in sizes.spec)
    factors = (factor for one in adapted for factor in _factors(one, config))
    spec = ModelSpec((*resting, *factors), sizes.spec.experts_per_token)
    return replace(sizes, spec=spec, adapts=any(one.is_expert for one in adapted))


def _rests(one: Parameter, config: GPTRunConfig) -> Resting | None:
    """How a parameter of the model is kept; None: it learns."""
    base = config.base
    if one.role == "router":
        return Resting("float32") if config.adapter.routers_rest else None
    if one.is_expert and one.is_matrix and base.storage in QUANTIZED:
        return Resting(base.storage, base.group_size)
    return Resting("float32" if base.storage == "float32" else "products")


def _factors(one: Parameter, config: GPTRunConfig) -> Iterator[Parameter]:
    """The factors A and B of a parameter's adapter; experts that share one have it once."""
    *lead, columns = one.shape
    adapter, experts = config.adapter, dict[str, Any]()
    rank = adapter.rank
    if one.is_expert:
        rank = adapter.expert_rank_of(config.model.moe.top_k)
        experts = {} if adapter.shared else {"expert": lead[0]}
        lead = lead[1:]
    part = one.part if experts else "adapters"
    of_a: dict[str, Any] = {"rank": rank, "model": columns}
    of_b: dict[str, Any] = {"rows": math.prod(lead), "rank": rank}
    for name, sizes in (("a", of_a), ("b", of_b)):
        factor = parameter(f"{one.name}.{name}", "matrix", part, **experts, **sizes)
        yield replace(factor, layer=one.layer)
