"""Memory of training a GPT on one device: exact for weights, gradients and optimizer, estimated for activations."""

from expertmesh.config.run import Optimizer, StateDtype
from expertmesh.config.short_sequence import HALVED_SEQUENCE, SHORT_SEQUENCE
from expertmesh.costs.flops import rows_per_token
from expertmesh.costs.memory import DTYPE_BYTES, MemoryEstimate, optimizer_bytes
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.feed_forward import num_branches


def _mlp_elements(hidden_dim: int, config: ModelConfig) -> int:
    """Elements that a dense feed-forward network saves per token: input, pre-activations, branches, product."""
    branches = num_branches(config.activation)
    kept = branches * hidden_dim + (2 * hidden_dim if branches == 2 else hidden_dim)
    return config.dim + kept


def layer_activation_bytes(
    config: ModelConfig, *, num_experts: int, dtype: str, seq_len: int
) -> int:
    """Bytes that one layer saves per token for its backward pass.

    Args:
        config: the model.
        num_experts: the number of experts of this layer; 0: dense.
        dtype: compute dtype.
        seq_len: tokens per sequence.

    Returns:
        An estimate from the tensors that PyTorch and our operators save on the CPU. Norms save their input, attention its
        queries, keys, values and output, experts their input and, without `recompute_h`, their pre-activations (see
        `ops/experts/moe_mlp.py`).
    """
    compute = DTYPE_BYTES[dtype]
    stream = max(compute, 4)
    moe = config.moe
    width = config.num_heads * config.head_size
    kv_width = config.kv_heads * config.head_size
    # Both norms save their input. In the compute dtype are saved: the input of the projections, their common output (values
    # and unrotated keys are views of it), rotated queries and keys, and the attention output.
    bytes_per_token = 2 * config.dim * stream
    bytes_per_token += (config.dim + 3 * width + 3 * kv_width) * compute
    if dtype == "bfloat16" and 1 < seq_len <= SHORT_SEQUENCE:
        first = seq_len // 2 if seq_len >= HALVED_SEQUENCE else 0
        seen = seq_len - first + first * first // seq_len  # keys per query, on average
        bytes_per_token += (config.num_heads * seen + kv_width) * compute  # probabilities, values
        if not config.qk_norm:
            bytes_per_token -= (width + 2 * kv_width) * compute  # the common output is not saved
    if config.sinks:  # saved in FP32: exponentials and probabilities of scores, queries and keys
        wide = DTYPE_BYTES["float64" if dtype == "float64" else "float32"]
        bytes_per_token += (2 * config.num_heads * seq_len + width + 2 * kv_width) * wide
    if config.qk_norm:
        bytes_per_token += width * compute  # queries before norm and rotation
    if config.is_latent:
        # latent vectors and inputs of their norms; heads of keys and values are counted above
        small = (config.latent.q_lora_rank or 0) + (config.latent.kv_lora_rank or 0)
        bytes_per_token += small * (compute + stream)
    if not num_experts:
        return bytes_per_token + _mlp_elements(config.ffn_hidden_dim, config) * compute
    branches = num_branches(config.activation)
    rows = 0 if moe.recompute_h else rows_per_token(moe, num_experts)
    elements = config.dim + round(rows * branches * moe.hidden_dim)
    if moe.num_shared_experts or moe.shared_hidden_dim:
        hidden_dim = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
        elements += _mlp_elements(hidden_dim, config)
    if moe.residual:
        # besides the MLP's tensors, both outputs are saved for the gradient of their coefficients
        elements += _mlp_elements(config.ffn_hidden_dim, config) + 2 * config.dim
    # the router saves its input, scores and logits in FP32
    router = config.dim * (stream if compute < stream else 0) + 3 * num_experts * stream
    return bytes_per_token + elements * compute + router


def estimate_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: str = "float32",
    activation_checkpointing: bool = False,
    optimizer: Optimizer = "adamw",
    state_dtype: StateDtype = "float32",
) -> MemoryEstimate:
    """Memory of a training step on one device.

    Args:
        config: the model.
        micro_batch_size: sequences per forward pass.
        seq_len: tokens per sequence.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
        activation_checkpointing: whether only inputs of layers are saved, and activations of one layer at a time.
        optimizer: name of the optimizer.
        state_dtype: dtype of its moments.

    Returns:
        Bytes by purpose. Of the temporary buffers only the gradient of the logits is counted.
    """
    compute = DTYPE_BYTES[dtype]
    master = max(compute, 4)
    parameters = gpt_spec(config).num_parameters
    tokens = micro_batch_size * seq_len
    per_layer = [
        layer_activation_bytes(config, num_experts=experts, dtype=dtype, seq_len=seq_len)
        for experts in config.experts_per_layer()
    ]
    layers = sum(per_layer)
    if activation_checkpointing:
        layers = len(per_layer) * config.dim * master + max(per_layer)
    # input and output of the final norm; in the compute dtype, the logits and, at the peak, their gradient
    head = config.dim * (master + compute) + 2 * config.vocab_size * compute
    return MemoryEstimate(
        weights_bytes=parameters * master,
        compute_copy_bytes=parameters * compute if compute < master else 0,
        gradients_bytes=parameters * master,
        optimizer_bytes=sum(
            optimizer_bytes(
                one, one.shape, optimizer=optimizer, state_dtype=state_dtype, master=master
            )
            for one in gpt_spec(config)
        ),
        activations_bytes=tokens * (layers + head),
    )
