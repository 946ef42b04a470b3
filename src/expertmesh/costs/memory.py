"""Memory of training a GPT on one device: exact for weights, gradients and optimiser, estimated for activations."""

from dataclasses import dataclass

from expertmesh.config.model import ModelConfig
from expertmesh.costs.parameters import GATED_ACTIVATIONS, count_parameters

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of training.

    Attributes:
        weights_bytes: the parameters as the optimiser keeps them: FP32, or FP64 in an FP64 run.
        compute_copy_bytes: their copies in BF16 or FP16, where the run computes in one of these.
        gradients_bytes: in the dtype of the weights.
        optimizer_bytes: both AdamW moments.
        activations_bytes: what one micro-batch keeps for the backward pass, estimated.
    """

    weights_bytes: int
    compute_copy_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weights_bytes
            + self.compute_copy_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
        )


def _mlp_elements(hidden_dim: int, config: ModelConfig) -> int:
    """Elements that a dense feed-forward network keeps per token: input, pre-activations, branches, product."""
    branches = 2 if config.activation in GATED_ACTIVATIONS else 1
    kept = branches * hidden_dim + (2 * hidden_dim if branches == 2 else hidden_dim)
    return config.dim + kept


SHORT_SEQUENCE = 256
"""Tokens up to which attention in BF16 on a CPU goes by, and keeps, its probabilities (`models/short_attention.py`)."""


def layer_activation_bytes(
    config: ModelConfig, *, num_experts: int, dtype: str, seq_len: int
) -> int:
    """Bytes that one layer keeps per token for its backward pass.

    Args:
        config: the model.
        num_experts: of this layer; 0: dense.
        dtype: compute dtype.
        seq_len: tokens per sequence.

    Returns:
        An estimate from the tensors that PyTorch and our operators save on the CPU: for the norms their input,
        for attention queries, keys, values and output, and for experts the input and, unless
        they are computed again (`recompute_h`), the pre-activations alone (see `ops/moe_mlp.py`).
    """
    compute = DTYPE_BYTES[dtype]
    stream = max(compute, 4)
    moe = config.moe
    width = config.num_heads * config.head_size
    kv_width = config.kv_heads * config.head_size
    # Two norms keep their input. In the compute dtype: input of the projections; their common output, which values and
    # unrotated keys are views of; rotated queries and keys; attention output.
    bytes_per_token = 2 * config.dim * stream
    bytes_per_token += (config.dim + 3 * width + 3 * kv_width) * compute
    if dtype == "bfloat16" and 1 < seq_len <= SHORT_SEQUENCE:
        bytes_per_token += (config.num_heads * seq_len + kv_width) * compute  # values of their own
        if not config.qk_norm:
            bytes_per_token -= (width + 2 * kv_width) * compute  # nothing keeps the common output
    if config.qk_norm:
        bytes_per_token += width * compute  # the queries before norm and rotation
    if not num_experts:
        return bytes_per_token + _mlp_elements(config.ffn_hidden_dim, config) * compute
    branches = 2 if config.activation in GATED_ACTIVATIONS else 1
    elements = config.dim + (0 if moe.recompute_h else moe.top_k * branches * moe.hidden_dim)
    if moe.num_shared_experts:
        elements += _mlp_elements(moe.num_shared_experts * moe.hidden_dim, config)
    if moe.residual:
        # Beside the MLP's own, both outputs wait for the gradient of their coefficients.
        elements += _mlp_elements(config.ffn_hidden_dim, config) + 2 * config.dim
    # The router keeps its input, scores and logits in FP32.
    router = config.dim * (stream if compute < stream else 0) + 3 * num_experts * stream
    return bytes_per_token + elements * compute + router


def estimate_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: str = "float32",
    activation_checkpointing: bool = False,
) -> MemoryEstimate:
    """Memory of a training step on one device.

    Args:
        config: the model.
        micro_batch_size: sequences per forward pass.
        seq_len: tokens per sequence.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
        activation_checkpointing: keep only the inputs of the layers, and one layer's activations at a time.

    Returns:
        Bytes by purpose. Of the temporary buffers only the gradient of the logits is counted.
    """
    compute = DTYPE_BYTES[dtype]
    master = max(compute, 4)
    parameters = count_parameters(config).total
    tokens = micro_batch_size * seq_len
    per_layer = [
        layer_activation_bytes(config, num_experts=experts, dtype=dtype, seq_len=seq_len)
        for experts in config.experts_per_layer()
    ]
    layers = sum(per_layer)
    if activation_checkpointing:
        layers = len(per_layer) * config.dim * master + max(per_layer)
    # Final norm and its output; in the compute dtype, the logits and, at the peak, their gradient.
    head = config.dim * (master + compute) + 2 * config.vocab_size * compute
    return MemoryEstimate(
        weights_bytes=parameters * master,
        compute_copy_bytes=parameters * compute if compute < master else 0,
        gradients_bytes=parameters * master,
        optimizer_bytes=2 * parameters * master,
        activations_bytes=tokens * (layers + head),
    )
