"""Specification of a Swin Transformer's parameters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expertmesh.config.moe import MoEConfig
from expertmesh.spec.feed_forward import mlp, moe
from expertmesh.spec.model_spec import ModelSpec, Parameter, Role, parameter
from expertmesh_families.swin.config import SwinConfig

POSITION_HIDDEN = 512
"""Hidden size of the MLP that computes the position bias."""
_FIRST_SCALE = 10.0


@lru_cache(maxsize=16)
def swin_spec(config: SwinConfig) -> ModelSpec:
    """Every parameter of a Swin Transformer, without building it; blocks are numbered through all stages."""
    return ModelSpec(tuple(_parameters(config)), experts_per_token=config.moe.top_k)


def _parameters(config: SwinConfig) -> Iterator[Parameter]:
    D, last = config.dim, config.stage_dims[-1]
    pixels = config.num_channels * config.patch_size**2
    yield from _linear("patches", "head", "patches", model=D, pixels=pixels)
    yield from _norm("patch_norm", D)
    index = 0
    for stage, counts in enumerate(config.experts_per_block()):
        for block, num_experts in enumerate(counts):
            for one in _block(config, stage, num_experts):
                yield one.inside(f"stages.{stage}.{block}.", layer=index)
            index += 1
    for stage, width in enumerate(config.stage_dims[:-1]):
        merge = f"merges.{stage}"
        yield from _norm(f"{merge}.norm", (2 if config.variant == "v2" else 4) * width)
        yield parameter(f"{merge}.proj.weight", "matrix", "merges", next=2 * width, model=4 * width)
    yield from _norm("final_norm", last)
    yield from _linear("head", "head", "output", classes=config.num_classes, model=last)


@dataclass(frozen=True)
class _Stage:
    """Feed-forward options of a stage, as `HasFeedForwards`."""

    dim: int
    ffn_hidden_dim: int
    moe: MoEConfig
    activation: str = "gelu"


def _block(config: SwinConfig, stage: int, num_experts: int) -> Iterator[Parameter]:
    D, is_v2 = config.stage_dims[stage], config.variant == "v2"
    hidden = round(config.mlp_ratio * D)
    experts = config.moe.model_copy(update={"hidden_dim": hidden, "bias": True})
    of_stage = _Stage(D, hidden, experts)
    # norms after V2's branches start at 0, so that a block starts as the identity
    first = 0.0 if is_v2 else None
    yield from _norm("attention_norm", D, begins=first)
    for one in _attention(D, config.num_heads[stage], is_v2=is_v2):
        yield one.inside("attention.")
    yield from _norm("ffn_norm", D, begins=first)
    found = moe(of_stage, num_experts)
    if not num_experts:
        found = mlp("ffn", "dense_ffn", of_stage, hidden, bias=True)
    no_bias = () if is_v2 else ("ffn.b_out", "moe.experts.b_out")
    yield from (one for one in found if one.name not in no_bias)


def _attention(D: int, heads: int, *, is_v2: bool) -> Iterator[Parameter]:
    part = "attention"
    if is_v2:
        yield parameter("q_bias", "bias", part, heads=D)
        yield parameter("v_bias", "bias", part, heads=D)
        yield parameter("log_scale", "scale", part, head=heads, begins=math.log(_FIRST_SCALE))
    yield parameter("qkv.weight", "matrix", part, heads=3 * D, model=D)
    if not is_v2:
        yield parameter("qkv.bias", "bias", part, heads=3 * D)
    yield from _linear("out", "matrix", part, model=D, heads=D)
    P = POSITION_HIDDEN
    yield from _linear("position_embedding.0", "positions", part, hidden=P, offset=2)
    yield parameter("position_embedding.2.weight", "positions", part, head=heads, hidden=P)


def _linear(name: str, role: Role, part: str, **sizes: Any) -> Iterator[Parameter]:
    yield parameter(f"{name}.weight", role, part, **sizes)
    axis = next(iter(sizes))
    rows: Any = {axis: sizes[axis]}
    yield parameter(f"{name}.bias", "bias", part, **rows)


def _norm(name: str, width: int, *, begins: float | None = None) -> Iterator[Parameter]:
    yield parameter(f"{name}.weight", "norm", "norms", model=width, begins=begins)
    yield parameter(f"{name}.bias", "bias", "norms", model=width)
