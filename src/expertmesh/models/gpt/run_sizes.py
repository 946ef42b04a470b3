"""Sizes of a GPT in a run: with adapters, which of its parameters rest and how they are kept, and the adapters'
factors."""

from dataclasses import replace

from expertmesh.config.frozen_base import QUANTIZED
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.sizes import GPTSizes, sizes_of
from expertmesh.spec.adapter_counts import factors
from expertmesh.spec.model_spec import ModelSpec, Parameter
from expertmesh.spec.resting import Resting


def sizes_of_run(config: GPTRunConfig) -> GPTSizes:
    """Sizes of a run's model, with adapters if it has some."""
    sizes, adapter = sizes_of(config.model), config.adapter
    if not adapter.rests:
        return sizes
    learning = tuple(factors(adapter, sizes.spec, num_tokens=len(config.tokens.add)))
    resting = (replace(one, rests=_rests(one, config)) for one in sizes.spec)
    spec = ModelSpec((*resting, *learning), sizes.spec.experts_per_token)
    return replace(sizes, spec=spec, adapts=any(".experts." in one.name for one in learning))


def _rests(one: Parameter, config: GPTRunConfig) -> Resting | None:
    """Storage of a parameter of the model; None: it learns."""
    base = config.base
    if one.role == "router":
        return Resting("float32") if config.adapter.routers_rest else None
    if one.is_expert and one.is_matrix and base.storage in QUANTIZED:
        return Resting(base.storage, base.group_size)
    return Resting("float32" if base.storage == "float32" else "products")
