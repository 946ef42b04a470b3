"""FLOPs of a GPT per token, from its configuration alone; `expertmesh.costs.flops` defines which operations count."""

from dataclasses import dataclass

from expertmesh.costs.flops import experts_flops, mlp_flops, router_flops, shared_flops
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.model_spec import num_elements


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one forward pass per token, summed over the layers."""

    projections_flops: int  # query, key, value and output projections
    attention_flops: int  # scores and weighted values
    dense_ffn_flops: int  # feed-forward layers without experts
    router_flops: int  # router logits
    experts_flops: int  # routed experts, K per MoE layer where tokens choose
    shared_flops: int  # shared experts and their gates, residual MLPs and residual coefficients
    output_flops: int  # logits over the vocabulary

    @property
    def layers_flops(self) -> int:
        """FLOPs of the transformer layers, without the output projection."""
        return (
            self.projections_flops
            + self.attention_flops
            + self.dense_ffn_flops
            + self.router_flops
            + self.experts_flops
            + self.shared_flops
        )

    @property
    def total_flops(self) -> int:
        """FLOPs of a forward pass per token."""
        return self.layers_flops + self.output_flops

    def training_flops(self, *, activation_checkpointing: bool = False) -> int:
        """FLOPs of forward and backward per token: 3 times the forward, and the layers once more if they are
        recomputed."""
        return 3 * self.total_flops + (self.layers_flops if activation_checkpointing else 0)


def forward_flops(config: ModelConfig, *, seq_len: int, causal: bool = True) -> ForwardFlops:
    """Operations of a forward pass over sequences of one length, per token.

    Args:
        seq_len: tokens per sequence (S).
        causal: whether to count the (S + 1) / 2 keys that a token sees on average, fewer with a window. False: all S
            keys, or the whole window, as kernels without causal skipping compute and many published utilisation figures
            assume.

    Returns:
        Operations per token; attention is rounded down to a whole number.
    """
    dim, layers = config.dim, config.experts_per_layer()
    moe_layers = [experts for experts in layers if experts]
    # sizes of a token's key and value, per head
    size = 2 * config.head_size
    if config.is_latent:
        size = config.head_size + config.latent.v_head_dim
    width = config.num_heads * size
    attention = 0.0
    for layer in range(config.num_layers):
        window = min(config.window_of(layer) or seq_len, seq_len)
        seen = window - window * (window - 1) / (2 * seq_len) if causal else window
        attention += 2 * width * seen
    # training multiplies every token with every matrix of attention once
    of_layer = gpt_spec(config).layers[0]
    matrices = num_elements(p for p in of_layer if p.part == "attention" and p.role == "matrix")

    return ForwardFlops(
        projections_flops=len(layers) * 2 * matrices,
        attention_flops=int(attention),
        dense_ffn_flops=(len(layers) - len(moe_layers)) * mlp_flops(config, config.ffn_hidden_dim),
        router_flops=sum(router_flops(config, experts) for experts in moe_layers),
        experts_flops=sum(experts_flops(config, experts) for experts in moe_layers),
        shared_flops=len(moe_layers) * shared_flops(config),
        output_flops=2 * dim * config.vocab_size,
    )
