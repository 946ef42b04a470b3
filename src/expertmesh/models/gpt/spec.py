"""Specification of a GPT's parameters, and their exact counts."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from expertmesh.models.gpt.config import ModelConfig
from expertmesh.spec.feed_forward import feed_forward
from expertmesh.spec.model_spec import ModelSpec, Parameter, parameter


@lru_cache(maxsize=16)
def gpt_spec(config: ModelConfig) -> ModelSpec:
    """Every parameter of a GPT, without building it."""
    return ModelSpec(tuple(_parameters(config)), experts_per_token=config.moe.top_k)


def _parameters(config: ModelConfig) -> Iterator[Parameter]:
    D, V = config.dim, config.vocab_size
    # embedding and output are sharded along the width for storage only, and gathered for use
    yield parameter(
        "embedding.weight",
        "embedding",
        "embedding",
        vocab=V,
        model=D,
        cut="model",
        hub="model.embed_tokens.weight",
    )
    for layer, num_experts in enumerate(config.experts_per_layer()):
        for one in _layer(config, num_experts):
            yield one.inside(f"layers.{layer}.", f"model.layers.{layer}.", layer=layer)
    yield parameter("final_norm.weight", "norm", "norms", model=D, hub="model.norm.weight")
    if not config.tie_embeddings:
        yield parameter("output.weight", "head", "output", vocab=V, model=D, cut="model", hub="lm_head.weight")


def prediction_spec(config: ModelConfig) -> ModelSpec:
    """The multi-token-prediction layer of some checkpoints (DeepSeek-V3, section 2.2), which no GPT of ours has.

    It uses the model's embedding and output, though some checkpoints repeat them. Published counts include it or not.
    """
    D, part = config.dim, "prediction"
    rows = [parameter(f"{name}.weight", "norm", part, model=D) for name in ("enorm", "hnorm")]
    rows.append(parameter("eh_proj.weight", "matrix", part, model=D, both=2 * D))
    rows += _layer(config, config.experts_per_layer()[-1])
    rows.append(parameter("final_norm.weight", "norm", part, model=D))
    return ModelSpec(tuple(rows), experts_per_token=config.moe.top_k)


def _layer(config: ModelConfig, num_experts: int) -> Iterator[Parameter]:
    D = config.dim
    yield parameter("attention_norm.weight", "norm", "norms", model=D, hub="input_layernorm.weight")
    attention = _latent_attention(config) if config.is_latent else _attention(config)
    yield from (one.inside("attention.", "self_attn.") for one in attention)
    yield parameter("ffn_norm.weight", "norm", "norms", model=D, hub="post_attention_layernorm.weight")
    yield from feed_forward(config, num_experts)


def _attention(config: ModelConfig) -> Iterator[Parameter]:
    D, head, part = config.dim, config.head_size, "attention"
    width, keys = config.num_heads * head, config.kv_heads * head
    rows = width + 2 * keys
    if config.sinks:
        yield parameter("sinks", "bias", part, heads=config.num_heads, cut="heads", hub="sinks")
    weights, biases = (tuple(f"{x}_proj.{kind}" for x in "qkv") for kind in ("weight", "bias"))
    yield parameter("qkv.weight", "matrix", part, heads=rows, model=D, cut="heads", hub=weights)
    if config.qkv_bias:
        yield parameter("qkv.bias", "bias", part, heads=rows, cut="heads", hub=biases)
    yield parameter(
        "out.weight",
        "matrix",
        part,
        model=D,
        heads=width,
        cut="heads",
        is_output=True,
        hub="o_proj.weight",
    )
    if config.out_bias:
        yield parameter("out.bias", "bias", part, model=D, hub="o_proj.bias")
    if config.qk_norm:
        whole = config.qk_norm_scope == "projection"
        for x, size in (("q", width), ("k", keys)):
            name = f"{x}_norm.weight"
            yield parameter(name, "norm", part, heads=size if whole else head, hub=name)


def _latent_attention(config: ModelConfig) -> Iterator[Parameter]:
    D, H, sizes, part = config.dim, config.num_heads, config.latent, "attention"
    small, rank = sizes.q_lora_rank, sizes.kv_lora_rank or 0
    rows = H * sizes.qk_head_dim
    if small is None:
        yield _matrix("q_up", "q_proj", heads=rows, model=D, cut="heads")
    else:
        yield _matrix("q_down", "q_a_proj", latent=small, model=D)
        yield parameter("q_norm.weight", "norm", part, latent=small, hub="q_a_layernorm.weight")
        yield _matrix("q_up", "q_b_proj", heads=rows, latent=small, cut="heads")
    both = rank + sizes.qk_rope_head_dim
    yield _matrix("kv_down", "kv_a_proj_with_mqa", latent=both, model=D)
    yield parameter("kv_norm.weight", "norm", part, latent=rank, hub="kv_a_layernorm.weight")
    rows = H * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    yield _matrix("kv_up", "kv_b_proj", heads=rows, latent=rank, cut="heads")
    width = H * sizes.v_head_dim
    yield _matrix("out", "o_proj", model=D, heads=width, cut="heads", is_output=True)


def _matrix(name: str, theirs: str, **sizes: Any) -> Parameter:
    return parameter(f"{name}.weight", "matrix", "attention", hub=f"{theirs}.weight", **sizes)


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters by part of the model; `total` counts each parameter once."""

    embedding: int  # token embedding
    output: int  # output projection; 0 when it is the embedding
    attention: int  # projections and query-key norms
    norms: int  # the norms of the residual stream
    dense_ffn: int  # feed-forward layers without experts
    router: int  # routers of all MoE layers
    experts: int  # routed experts
    shared: int  # shared experts
    residual: int  # residual MLPs and coefficients
    inactive_experts: int  # routed experts' parameters that one token does not use: all but K experts per MoE layer

    @property
    def total(self) -> int:
        """All parameters."""
        parts = (f.name for f in fields(self) if f.name != "inactive_experts")
        return sum(getattr(self, name) for name in parts)

    @property
    def active(self) -> int:
        """Parameters that one token uses, the embedding included (the convention of "47B, 13B active")."""
        return self.total - self.inactive_experts


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a GPT exactly, without building it.

    Returns:
        The counts; `total` equals the sum over `GPT(config, device="meta").parameters()`.
    """
    spec = gpt_spec(config)
    parts = [f.name for f in fields(ParameterCount) if f.name != "inactive_experts"]
    counts = {part: spec.count(part) for part in parts}
    return ParameterCount(**counts, inactive_experts=spec.num_inactive)
