"""What an encoder-decoder costs: parameters, operations, memory, from its configuration alone.

Items are target tokens. A sample is taken to be as long as the model allows on both sides, so counts of tokens are upper bounds,
and each target token bears its part of reading the source.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from expertmesh.config.seq2seq import Seq2SeqConfig, Seq2SeqRunConfig
from expertmesh.costs.flops import (
    experts_flops,
    mlp_flops,
    router_flops,
    rows_per_token,
    shared_flops,
)
from expertmesh.costs.memory import memory_by_size
from expertmesh.costs.parameters import ParameterShape, feed_forward_shapes
from expertmesh.costs.run import RunCosts


def parameter_shapes(config: Seq2SeqConfig) -> Iterator[ParameterShape]:
    """Every parameter of an encoder-decoder, without building it.

    Args:
        config: the model.
    """
    D, V = config.dim, config.vocab_size
    yield ParameterShape("embedding.weight", (V, D), None)
    layer = 0
    for side, counts in zip(("encoder", "decoder"), config.experts_per_layer(), strict=True):
        for index, num_experts in enumerate(counts):
            for name, shape in _layer_shapes(config, num_experts, reads_source=side == "decoder"):
                yield ParameterShape(f"{side}.{index}.{name}", shape, layer)
            layer += 1
    yield ParameterShape("encoder_norm.weight", (D,), None)
    yield ParameterShape("final_norm.weight", (D,), None)
    if not config.tie_embeddings:
        yield ParameterShape("output.weight", (V, D), None)
    if config.positions == "untied":
        for side, places in (("source", config.max_source_len), ("target", config.max_seq_len)):
            yield ParameterShape(f"{side}_places.embedding.weight", (places, D), None)
            yield ParameterShape(f"{side}_places.norm.weight", (D,), None)
            yield ParameterShape(f"{side}_places.q.weight", (D, D), None)
            yield ParameterShape(f"{side}_places.k.weight", (D, D), None)


def _layer_shapes(
    config: Seq2SeqConfig, num_experts: int, *, reads_source: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    D = config.dim
    yield "attention_norm.weight", (D,)
    yield "attention.qkv.weight", (3 * D, D)
    yield "attention.out.weight", (D, D)
    if reads_source:
        yield "cross_norm.weight", (D,)
        yield "cross_attention.q.weight", (D, D)
        yield "cross_attention.kv.weight", (2 * D, D)
        yield "cross_attention.out.weight", (D, D)
    yield "ffn_norm.weight", (D,)
    yield from ((name, shape) for name, shape, _ in feed_forward_shapes(config, num_experts))


@dataclass(frozen=True)
class TranslationFlops:
    """Operations of a forward pass, two per multiply-add, products of matrices alone.

    Attributes:
        source_flops: per source token: the encoder, and its keys and values for the decoder.
        target_flops: per target token: the decoder and the logits.
    """

    source_flops: int
    target_flops: int


def forward_flops(
    config: Seq2SeqConfig, *, source_len: int, target_len: int, batch_size: int = 1
) -> TranslationFlops:
    """Operations of a forward pass over sources and targets of these lengths.

    Args:
        config: the model.
        source_len: tokens of a source.
        target_len: tokens of a target; of these, one sees (target_len + 1) / 2 on average.
        batch_size: samples that share the queries and keys of untied positions, which are made once for all of them.
    """
    D = config.dim
    square = 2 * D * D
    encoder, decoder = config.experts_per_layer()
    is_untied = config.positions == "untied"
    looks = 8 * D if is_untied else 4 * D  # at one token: heads have a second half for the places
    read = len(encoder) * (4 * square + looks * source_len) + len(decoder) * 2 * square
    written = len(decoder) * ((4 + 2) * square + looks * (target_len + 1) // 2 + 4 * D * source_len)
    if is_untied:
        read, written = (flops + 2 * square // batch_size for flops in (read, written))
    read += sum(_feed_forward_flops(config, experts) for experts in encoder)
    written += sum(_feed_forward_flops(config, experts) for experts in decoder)
    return TranslationFlops(read, written + 2 * D * config.vocab_size)


def _feed_forward_flops(config: Seq2SeqConfig, num_experts: int) -> int:
    """Of one layer per token."""
    if not num_experts:
        return mlp_flops(config, config.ffn_hidden_dim)
    routed = router_flops(config, num_experts) + experts_flops(config, num_experts)
    return routed + shared_flops(config)


def seq2seq_costs(config: Seq2SeqRunConfig, *, num_ranks: int, dtype: str) -> RunCosts:
    """The costs of training an encoder-decoder.

    Args:
        config: the run; its degrees fit the ranks.
        num_ranks: the number of ranks of the world.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
    """
    model, train = config.model, config.train
    S, T = model.max_source_len, model.max_seq_len
    total = active = outside = of_muon = 0
    dense: dict[int, int] = {}
    for parameter in parameter_shapes(model):
        total += parameter.num_elements
        if config.optim.name == "muon" and parameter.is_matrix:
            of_muon += parameter.num_elements
        share = 1.0
        if parameter.is_expert:
            share = min(model.moe.top_k / parameter.shape[0], 1.0)
        elif parameter.layer is None:
            outside += parameter.num_elements
        else:
            dense[parameter.layer] = dense.get(parameter.layer, 0) + parameter.num_elements
        active += round(parameter.num_elements * share)
    samples = train.samples_per_pass
    flops = forward_flops(model, source_len=S, target_len=T, batch_size=samples)
    alone, each = memory_by_size(
        total,
        outside=outside,
        layers=list(dense.values()),
        muon_parameters=of_muon,
        activation_elements=samples * _activation_elements(model),
        parallel=config.parallel,
        num_ranks=num_ranks,
        dtype=dtype,
    )
    return RunCosts(
        parameters=total,
        active=active,
        num_items=train.steps * train.batch_size * T,
        flops_per_item=3 * (flops.target_flops + flops.source_flops * S // T),
        alone=alone,
        each=each,
    )


def _activation_elements(config: Seq2SeqConfig) -> int:
    """Elements that one sample keeps for the backward pass: those of attention, dropout, norms and feed-forwards, and the logits.

    With untied positions queries, keys, values and what attention gives are twice as wide, 8 D in the place of 6 with the
    projection behind them, and the half of the latter is a copy. The places' own, which a batch has once, are left out.
    """
    D, S, T = config.dim, config.max_source_len, config.max_seq_len
    total = 2 * T * config.vocab_size
    wider = 3 if config.positions == "untied" else 0
    for tokens, counts, parts in zip((S, T), config.experts_per_layer(), (9, 15), strict=True):
        for num_experts in counts:
            hidden: float = config.ffn_hidden_dim
            if num_experts:
                hidden = rows_per_token(config.moe, num_experts) * config.moe.hidden_dim
            total += tokens * ((parts + wider) * D + round(2 * hidden))
    return total
