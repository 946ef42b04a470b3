"""Activations that training keeps of a GPT, from the tensors that its layers save."""

from functools import lru_cache

from expertmesh.config.short_sequence import HALVED_SEQUENCE, SHORT_SEQUENCE
from expertmesh.costs.flops import rows_per_token
from expertmesh.costs.rank_layout import Checkpointing, RankLayout, Workload
from expertmesh.costs.sizes import Activations, chunk_rows
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.spec.feed_forward import num_branches


def _mlp_elements(hidden_dim: int, config: ModelConfig) -> int:
    """Elements that a dense feed-forward network saves per token: input, pre-activations, branches, product."""
    branches = num_branches(config.activation)
    kept = branches * hidden_dim + (2 * hidden_dim if branches == 2 else hidden_dim)
    return config.dim + kept


def layer_activation_bytes(
    config: ModelConfig,
    *,
    num_experts: int,  # the number of experts of this layer; 0: dense
    work: Workload,  # sequences and compute dtype
    arrived: float = 0.0,  # rows per token that come from other ranks, saved beside a rank's own tokens
    recomputes_h: bool = False,  # whether the experts' pre-activations are computed again
    adapts: bool = False,  # whether experts have adapters, which save their rows and products, and recompute nothing
) -> float:
    """Bytes that one layer saves per token for its backward pass.

    Returns:
        An estimate from the tensors that PyTorch and our operators save on the CPU. Norms save their input, attention
        its queries, keys, values and output, experts their input and, without `recomputes_h`, their pre-activations
        (see `ops/experts/moe_mlp.py`).
    """
    compute, stream, seq_len = work.element_bytes, work.master_bytes, work.seq_len
    moe = config.moe
    width = config.num_heads * config.head_size
    kv_width = config.kv_heads * config.head_size
    # Both norms save their input. In the compute dtype are saved: the input of the projections, their common output
    # (values and unrotated keys are views of it), rotated queries and keys, and the attention output.
    bytes_per_token: float = 2 * config.dim * stream
    bytes_per_token += (config.dim + 3 * width + 3 * kv_width) * compute
    if work.precision == "bfloat16" and not work.on_gpu and 1 < seq_len <= SHORT_SEQUENCE:
        first = -(-seq_len // 2) if seq_len >= HALVED_SEQUENCE else 0
        seen = seq_len - first + first * first // seq_len  # keys per query, on average
        bytes_per_token += config.num_heads * seen * compute  # probabilities
    if config.sinks:  # saved in FP32: exponentials and probabilities of scores, queries and keys
        bytes_per_token += (2 * config.num_heads * seq_len + width + 2 * kv_width) * stream
    if config.qk_norm:
        bytes_per_token += width * compute  # queries before norm and rotation
    if config.is_latent:
        # latent vectors and inputs of their norms; heads of keys and values are counted above
        small = (config.latent.q_lora_rank or 0) + (config.latent.kv_lora_rank or 0)
        bytes_per_token += small * (compute + stream)
    if not num_experts:
        return bytes_per_token + _mlp_elements(config.ffn_hidden_dim, config) * compute
    branches = num_branches(config.activation)
    all_rows = arrived or rows_per_token(moe, num_experts)
    rows = 0 if recomputes_h and not adapts else all_rows
    elements = (1 + arrived) * config.dim + rows * branches * moe.hidden_dim
    if adapts:
        elements += all_rows * (config.dim + moe.hidden_dim)
    if moe.num_shared_experts or moe.shared_hidden_dim:
        hidden_dim = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
        elements += _mlp_elements(hidden_dim, config)
    if moe.residual:
        # besides the MLP's tensors, both outputs are saved for the gradient of their coefficients
        elements += _mlp_elements(config.ffn_hidden_dim, config) + 2 * config.dim
    # the router saves its input, scores and logits in FP32
    router = config.dim * (stream if compute < stream else 0) + 3 * num_experts * stream
    return bytes_per_token + elements * compute + router


def gpt_activations(config: ModelConfig, layout: RankLayout, work: Workload, *, adapts: bool = False) -> Activations:
    """Activations of a rank, layer by layer; of the temporary buffers only the gradient of the logits is counted."""
    T = layout.tokens_per_pass(work.seq_len)
    kept, recomputed, dispatch, logits = _per_token(
        config, layout.checkpointing, layout.route_degree, layout.layer_routes, work, adapts
    )
    rows = min(T, chunk_rows(config.vocab_size, on_gpu=work.on_gpu))
    return Activations(T * kept, T * recomputed, T * dispatch / layout.overlap_degree, rows * logits)


@lru_cache(maxsize=1024)
def _per_token(
    config: ModelConfig,
    checkpointing: Checkpointing,
    route_degree: int,
    layer_routes: tuple[int, ...],
    work: Workload,
    adapts: bool,
) -> tuple[float, float, float, float]:
    """Bytes per token (kept, recomputed, in dispatch, of logits)."""
    b, stream, again = work.element_bytes, work.master_bytes, checkpointing == "full"
    # whole layers are recomputed as they are computed; else the layout says what of the experts is
    recomputes_h = config.moe.recompute_h if again else checkpointing == "experts"
    layout = RankLayout(1, route_degree=route_degree, layer_routes=layer_routes)
    layers, most, index = [], 0.0, 0
    for num_experts in config.experts_per_layer():
        arrived = 0.0
        if num_experts:
            if layout.route_of(index) > 1:
                arrived = layout.fullest(rows_per_token(config.moe, num_experts), work)
            index += 1
        most = max(most, arrived)
        layers.append(
            layer_activation_bytes(
                config,
                num_experts=num_experts,
                work=work,
                arrived=arrived,
                recomputes_h=recomputes_h,
                adapts=adapts,
            )
        )
    kept = len(layers) * config.dim * stream if again else sum(layers)
    # input and output of the final norm; in the compute dtype, logits of a chunk and, at the peak, their gradient
    head = config.dim * (stream + b)
    return (
        kept + head,
        max(layers) if again else 0.0,
        most * config.dim * b,
        2 * config.vocab_size * b,
    )
