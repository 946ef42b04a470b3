"""Specification of an encoder-decoder's parameters."""

from collections.abc import Iterator
from functools import lru_cache

from expertmesh.spec.feed_forward import feed_forward
from expertmesh.spec.model_spec import ModelSpec, Parameter, parameter
from expertmesh_families.seq2seq.config import Seq2SeqConfig


@lru_cache(maxsize=16)
def seq2seq_spec(config: Seq2SeqConfig) -> ModelSpec:
    """Every parameter of an encoder-decoder, without building it; decoder layers are numbered after the encoder's."""
    return ModelSpec(tuple(_parameters(config)), experts_per_token=config.moe.top_k)


def _parameters(config: Seq2SeqConfig) -> Iterator[Parameter]:
    D, V = config.dim, config.vocab_size
    yield parameter("embedding.weight", "embedding", "embedding", vocab=V, model=D)
    sides = config.experts_per_layer()
    for side, counts, first in zip(("encoder", "decoder"), sides, (0, len(sides[0])), strict=True):
        for index, num_experts in enumerate(counts):
            for one in _layer(config, num_experts, reads_source=side == "decoder"):
                yield one.inside(f"{side}.{index}.", layer=first + index)
    yield parameter("encoder_norm.weight", "norm", "norms", model=D)
    yield parameter("final_norm.weight", "norm", "norms", model=D)
    if not config.tie_embeddings:
        yield parameter("output.weight", "head", "output", vocab=V, model=D)
    if config.positions == "untied":
        for side, places in (("source", config.max_source_len), ("target", config.max_seq_len)):
            of_side = _positions(config.dim, places)
            yield from (one.inside(f"{side}_places.") for one in of_side)


def _layer(config: Seq2SeqConfig, num_experts: int, *, reads_source: bool) -> Iterator[Parameter]:
    D = config.dim
    yield parameter("attention_norm.weight", "norm", "norms", model=D)
    yield from (one.inside("attention.") for one in _attention(D, qkv=3 * D))
    if reads_source:
        yield parameter("cross_norm.weight", "norm", "norms", model=D)
        yield from (one.inside("cross_attention.") for one in _attention(D, q=D, kv=2 * D))
    yield parameter("ffn_norm.weight", "norm", "norms", model=D)
    yield from feed_forward(config, num_experts)


def _attention(D: int, **rows: int) -> Iterator[Parameter]:
    for name, size in rows.items():
        yield parameter(f"{name}.weight", "matrix", "attention", heads=size, model=D)
    yield parameter("out.weight", "matrix", "attention", model=D, heads=D, is_output=True)


def _positions(D: int, places: int) -> Iterator[Parameter]:
    yield parameter("embedding.weight", "embedding", "positions", place=places, model=D)
    yield parameter("norm.weight", "norm", "positions", model=D)
    for name in ("q", "k"):
        yield parameter(f"{name}.weight", "matrix", "positions", heads=D, model=D)
