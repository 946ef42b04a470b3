"""Costs of training an encoder-decoder from its configuration alone: parameters, FLOPs, memory.

Items are target tokens. Samples are counted with the maximum lengths of the model, so numbers of tokens are upper
bounds. The cost of encoding the source is divided among the target tokens.
"""

from dataclasses import dataclass

from expertmesh.config.cluster import Precision
from expertmesh.costs.flops import (
    experts_flops,
    mlp_flops,
    router_flops,
    rows_per_token,
    shared_flops,
)
from expertmesh.costs.run_costs import RunCosts, SampleSizes, memory_of
from expertmesh_families.seq2seq.config import Seq2SeqConfig, Seq2SeqRunConfig
from expertmesh_families.seq2seq.spec import seq2seq_spec


@dataclass(frozen=True)
class TranslationFlops:
    """FLOPs of the matrix products of a forward pass, two per multiply-add."""

    source_flops: int  # FLOPs per source token: the encoder, and keys and values for the decoder
    target_flops: int  # FLOPs per target token: the decoder and the logits


def forward_flops(config: Seq2SeqConfig, *, source_len: int, target_len: int, batch_size: int = 1) -> TranslationFlops:
    """FLOPs of a forward pass over sources and targets of the given lengths.

    Args:
        target_len: tokens of a target; a target token sees (target_len + 1) / 2 of them on average.
        batch_size: samples that share the queries and keys of untied positions, which are computed once per batch.
    """
    D = config.dim
    square = 2 * D * D
    encoder, decoder = config.experts_per_layer()
    is_untied = config.positions == "untied"
    looks = 8 * D if is_untied else 4 * D  # per visible token; untied: doubled heads
    read = len(encoder) * (4 * square + looks * source_len) + len(decoder) * 2 * square
    written = len(decoder) * ((4 + 2) * square + looks * (target_len + 1) // 2 + 4 * D * source_len)
    if is_untied:
        read, written = (flops + 2 * square // batch_size for flops in (read, written))
    read += sum(_feed_forward_flops(config, experts) for experts in encoder)
    written += sum(_feed_forward_flops(config, experts) for experts in decoder)
    return TranslationFlops(read, written + 2 * D * config.vocab_size)


def _feed_forward_flops(config: Seq2SeqConfig, num_experts: int) -> int:
    """FLOPs per token of one feed-forward layer."""
    if not num_experts:
        return mlp_flops(config, config.ffn_hidden_dim)
    routed = router_flops(config, num_experts) + experts_flops(config, num_experts)
    return routed + shared_flops(config)


def seq2seq_costs(config: Seq2SeqRunConfig, *, num_ranks: int, dtype: Precision, on_gpu: bool = False) -> RunCosts:
    """The costs of training an encoder-decoder."""
    model, train = config.model, config.train
    S, T = model.max_source_len, model.max_seq_len
    spec = seq2seq_spec(model)
    samples = train.samples_per_pass
    flops = forward_flops(model, source_len=S, target_len=T, batch_size=samples)
    sizes = SampleSizes(spec, activation_elements(model))
    return RunCosts(
        parameters=spec.num_parameters,
        active=spec.num_active,
        num_items=train.steps * train.batch_size * T,
        flops_per_item=3 * (flops.target_flops + flops.source_flops * S // T),
        memory=memory_of(sizes, config, num_ranks=num_ranks, dtype=dtype, on_gpu=on_gpu),
    )


def activation_elements(config: Seq2SeqConfig) -> int:
    """Elements that one sample saves for the backward pass: attention, dropout, norms, feed-forwards and logits.

    With untied positions, queries, keys, values and attention output have double width: 8 D, instead of 6 D for them
    and the projection's output, plus D for the copied half of the attention output. Queries and keys of the positions,
    which a batch has once, are left out.
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
