"""Options of the GPT model family and of the mixture-of-experts layers in it."""

from typing import Literal

from pydantic import Field

from expertmesh.config.base import Config
from expertmesh.errors import ConfigError

Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "relu2", "silu"]
ScoreFunction = Literal["softmax", "sigmoid", "softmax_after_topk"]
RouterKind = Literal["topk", "cosine", "expert_choice", "hash"]
RouterNoise = Literal["none", "gumbel", "gaussian"]
NormalizeWeights = Literal["auto", "none", "topk", "kept"]
DropPolicy = Literal["first", "priority", "random"]
BalanceLoss = Literal["switch", "importance_load", "none"]
LossScope = Literal["group", "global"]
Backend = Literal["auto", "torch", "reference"]


class MoEConfig(Config):
    """The mixture-of-experts layers; the names are those of `expertmesh.MoELayer`."""

    num_experts: tuple[int, ...] = (8,)
    """Experts per MoE layer: one number for all of them, or one per MoE layer (a pyramid); none: a dense model."""
    top_k: int = 2
    """Experts per token (K), from 1 to the number of experts."""
    hidden_dim: int = 512
    """Hidden size of one expert (F)."""
    router: RouterKind = "topk"
    """How tokens find experts."""
    score_function: ScoreFunction = "softmax"
    """What turns router logits into scores."""
    normalize_weights: NormalizeWeights = "auto"
    """Divide the weights by their sum over the chosen (topk) or the surviving (kept) experts; auto: topk if top_k > 1."""
    weight_scale: float = 1.0
    """Factor on the routing weights (DeepSeek's routed scaling factor)."""
    router_noise: RouterNoise = "none"
    """Noise on the logits in training: gumbel (DeepSpeed's RSample) or gaussian (Tutel's gate noise)."""
    router_noise_std: float = 1.0
    """Scale of the router noise."""
    input_jitter: float = 0.0
    """Router input times a uniform factor in 1 +- this, in training."""
    input_dropout: float = 0.0
    """Dropout probability on the router input, in training."""
    logit_temperature: float = 1.0
    """Logits are divided by this."""
    num_expert_groups: int = 1
    """Groups of experts for group-limited (node-limited) routing; 1: no limit."""
    num_limited_groups: int = 1
    """Groups that a token may use, when there are several."""
    bias_update_rate: float = 0.0
    """Step of the aux-loss-free balancing bias; 0: no bias."""
    capacity_factor: float | None = None
    """Rows per expert in training as a ratio of the even share; none: dropless."""
    eval_capacity_factor: float | None = None
    """The same in evaluation; none: dropless."""
    min_capacity: int = 4
    """Least rows per expert and routing group when a capacity is set."""
    max_capacity_factor: float | None = None
    """Upper bound on any expert's rows as a ratio of the even share, also for a dropless layer; none: no bound."""
    drop_policy: DropPolicy = "random"
    """Which rows stay when an expert is over capacity."""
    routing_group_size: int | None = None
    """Tokens per routing group for capacity and balance loss; none: all tokens of a call."""
    num_shared_experts: int = 0
    """Experts that every token passes, beside the routed ones."""
    residual: bool = False
    """PR-MoE's residual layer: a dense MLP beside the experts, mixed by a learned two-way coefficient."""
    balance_loss: BalanceLoss = "switch"
    """Form of the load-balancing loss."""
    balance_loss_scope: LossScope = "group"
    """Tokens over which the balance loss counts: each routing group, or the whole batch."""
    aux_loss_weight: float = 0.01
    """Weight of the balance loss."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss."""
    bias: bool = False
    """Biases in the experts."""
    backend: Backend = "auto"
    """Implementation of the operators."""


class ModelConfig(Config):
    """A GPT: RMSNorm, RoPE, grouped-query attention, and MoE in every n-th layer."""

    vocab_size: int = Field(default=4096, gt=0)
    """Tokens in the vocabulary (V)."""
    max_seq_len: int = Field(default=256, gt=0)
    """Longest sequence (S)."""
    dim: int = Field(default=256, gt=0)
    """Model width (D)."""
    num_layers: int = Field(default=6, gt=0)
    """Transformer layers."""
    num_heads: int = Field(default=4, gt=0)
    """Attention heads (H)."""
    num_kv_heads: int | None = None
    """Key and value heads of grouped-query attention; none: num_heads."""
    head_dim: int | None = None
    """Size of one head; none: dim / num_heads."""
    ffn_hidden_dim: int = Field(default=1024, gt=0)
    """Hidden size of the dense feed-forward layers, and of the residual MLP of a residual MoE layer."""
    activation: Activation = "swiglu"
    """Activation of experts and dense feed-forward layers."""
    qk_norm: bool = False
    """RMSNorm on queries and keys of every head."""
    tie_embeddings: bool = True
    """One matrix for input embedding and output projection."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    moe_every: int = Field(default=1, gt=0)
    """Every n-th layer is MoE, counted from the first group's last layer (2: layers 1, 3, 5, ...)."""
    moe: MoEConfig = MoEConfig()
    """The mixture-of-experts layers."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head, resolved."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def experts_per_layer(self) -> tuple[int, ...]:
        """Number of experts of every layer; 0 where the feed-forward is dense."""
        counts = self.moe.num_experts
        moe_layers = [i for i in range(self.num_layers) if i % self.moe_every == self.moe_every - 1]
        if not counts or not moe_layers:
            return (0,) * self.num_layers
        counts = counts * len(moe_layers) if len(counts) == 1 else counts
        if len(counts) != len(moe_layers):
            raise ConfigError(
                f"moe.num_experts={self.moe.num_experts}: {len(counts)} numbers for {len(moe_layers)} MoE layers"
                f" ({self.num_layers} layers, moe_every={self.moe_every}); give one number, or one per MoE layer"
            )
        experts = dict(zip(moe_layers, counts, strict=True))
        return tuple(experts.get(i, 0) for i in range(self.num_layers))
