"""Options of the GPT model family and of the mixture-of-experts layers in it."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError, Location
from expertmesh.errors import ConfigError

Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "relu2", "silu"]
ScoreFunction = Literal["softmax", "sigmoid", "softmax_after_topk"]
RouterKind = Literal["topk", "cosine", "expert_choice", "hash"]
RouterNoise = Literal["none", "gumbel", "gaussian", "gumbel_after_first"]
NormalizeWeights = Literal["auto", "none", "topk", "kept"]
DropPolicy = Literal["first", "priority", "random"]
BalanceLoss = Literal["switch", "gshard", "importance_load", "none"]
LossScope = Literal["group", "global"]
Backend = Literal["auto", "triton", "torch", "reference"]


class MoEConfig(Config):
    """The mixture-of-experts layers; the names are those of `expertmesh.MoELayer`."""

    num_experts: tuple[Annotated[int, Field(gt=0)], ...] = (8,)
    """Experts per MoE layer: one number for all of them, or one per MoE layer (a pyramid); none: a dense model."""
    top_k: int = Field(default=2, gt=0)
    """Experts per token (K), from 1 to the number of experts."""
    hidden_dim: int = Field(default=512, gt=0)
    """Hidden size of one expert (F)."""
    router: RouterKind = "topk"
    """How tokens find experts."""
    score_function: ScoreFunction = "softmax"
    """What turns router logits into scores."""
    normalize_weights: NormalizeWeights = "auto"
    """Divide the weights by their sum over the chosen (topk) or the surviving (kept) experts; auto: topk if top_k > 1."""
    weight_scale: float = Field(default=1.0, gt=0)
    """Factor on the routing weights (DeepSeek's routed scaling factor)."""
    router_noise: RouterNoise = "none"
    """Noise on the logits in training: gumbel (DeepSpeed's RSample) or gaussian (Tutel's gate noise)."""
    router_noise_std: float = Field(default=1.0, ge=0)
    """Scale of the router noise."""
    input_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Router input times a uniform factor in 1 +- this, in training."""
    input_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the router input, in training."""
    logit_temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this."""
    num_expert_groups: int = Field(default=1, gt=0)
    """Groups of experts for group-limited (node-limited) routing; 1: no limit."""
    num_limited_groups: int = Field(default=1, gt=0)
    """Groups that a token may use, when there are several."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the aux-loss-free balancing bias; 0: no bias."""
    cosine_dim: int = 256
    """Dimensions in which the cosine router compares tokens with experts."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Rows per expert in training as a ratio of the even share; none: dropless."""
    eval_capacity_factor: float | None = Field(default=None, gt=0)
    """The same in evaluation; none: dropless."""
    min_capacity: int = Field(default=4, ge=0)
    """Least rows per expert and routing group when a capacity is set."""
    max_capacity_factor: float | None = Field(default=None, gt=0)
    """Upper bound on any expert's rows as a ratio of the even share, also for a dropless layer; none: no bound."""
    drop_policy: DropPolicy = "random"
    """Which rows stay when an expert is over capacity."""
    routing_group_size: int | None = Field(default=None, gt=0)
    """Tokens per routing group for capacity and balance loss; none: all tokens of a call."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token passes, beside the routed ones."""
    residual: bool = False
    """PR-MoE's residual layer: a dense MLP beside the experts, mixed by a learned two-way coefficient."""
    balance_loss: BalanceLoss = "switch"
    """Form of the load-balancing loss."""
    balance_loss_scope: LossScope = "group"
    """Tokens over which the balance loss counts: each routing group, or the whole batch."""
    aux_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the balance loss."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss."""
    bias: bool = False
    """Biases in the experts."""
    recompute_h: bool = False
    """Compute the experts' pre-activations again in the backward instead of keeping them: less memory, more time."""
    backend: Backend = "auto"
    """Implementation of the operators."""
    batch_invariant: bool = False
    """In evaluation the layers give a token the same bits in every batch (slower); model.batch_invariant sets it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_experts:
            self._check_routing(min(self.num_experts))
            self._check_router()
        if self.batch_invariant:
            self.check_invariant()
        if self.num_limited_groups > self.num_expert_groups:
            raise FieldError(
                "num_limited_groups",
                self.num_limited_groups,
                f"must be at most num_expert_groups, {self.num_expert_groups}",
                "lower it or raise num_expert_groups",
            )
        bound, factor = self.max_capacity_factor, self.capacity_factor
        if bound is not None and factor is not None and bound < factor:
            raise FieldError(
                "max_capacity_factor",
                bound,
                f"must be at least capacity_factor, {factor}",
                "raise it or lower capacity_factor",
            )
        return self

    def check_invariant(self, *, under: tuple[str, ...] = ()) -> None:
        """Refuses what makes a token's result depend on its batch in evaluation; `under` is where this object lies."""
        for name in ("eval_capacity_factor", "max_capacity_factor"):
            value = getattr(self, name)
            if value is not None and not math.isinf(value):
                raise FieldError(
                    (*under, name),
                    value,
                    "makes drops in evaluation depend on the batch, which batch_invariant rules out",
                    f"leave {name} out, or batch_invariant",
                )
        if self.router == "expert_choice":
            raise FieldError(
                (*under, "router"),
                self.router,
                "lets experts choose among the tokens of the batch, which batch_invariant rules out",
                "use another router, or leave batch_invariant out",
            )
        if self.backend == "reference":
            raise FieldError(
                (*under, "backend"),
                self.backend,
                "orders its sums by the batch, which batch_invariant rules out",
                "use auto, torch or triton, or leave batch_invariant out",
            )

    def _check_router(self) -> None:
        """Refuses options that the chosen router would ignore."""
        if self.router == "expert_choice" and self.score_function == "softmax_after_topk":
            raise FieldError(
                "score_function",
                self.score_function,
                "needs tokens that choose, and with router=expert_choice experts choose",
                "use softmax or sigmoid",
            )
        ignored: tuple[str, ...] = ()
        if self.router in ("hash", "expert_choice"):
            ignored += ("num_expert_groups", "bias_update_rate")
        if self.router == "hash":
            ignored += ("router_noise", "input_jitter", "input_dropout", "logit_temperature")
        for name in ignored:
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise FieldError(
                    name,
                    getattr(self, name),
                    f"has no effect with router={self.router}",
                    f"leave it at {default}",
                )

    def _check_routing(self, fewest: int) -> None:
        if self.top_k > fewest:
            raise FieldError(
                "top_k",
                self.top_k,
                f"must be at most the fewest experts of a layer, {fewest}",
                "lower top_k or raise num_experts",
            )
        for num_experts in self.num_experts:
            if num_experts % self.num_expert_groups:
                raise FieldError(
                    "num_expert_groups",
                    self.num_expert_groups,
                    f"must divide the number of experts, {num_experts}",
                    "choose a divisor",
                )
        reachable = self.num_limited_groups * (fewest // self.num_expert_groups)
        if self.num_expert_groups > 1 and self.top_k > reachable:
            raise FieldError(
                "top_k",
                self.top_k,
                f"must be at most the experts in num_limited_groups={self.num_limited_groups} groups, {reachable}",
                "lower top_k or raise num_limited_groups",
            )


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
    num_kv_heads: int | None = Field(default=None, gt=0)
    """Key and value heads of grouped-query attention; none: num_heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Size of one head; none: dim / num_heads."""
    ffn_hidden_dim: int = Field(default=1024, gt=0)
    """Hidden size of the dense feed-forward layers, and of the residual MLP of a residual MoE layer."""
    activation: Activation = "swiglu"
    """Activation of experts and dense feed-forward layers."""
    qk_norm: bool = False
    """RMSNorm on queries and keys of every head."""
    tie_embeddings: bool = True
    """One matrix for input embedding and output projection."""
    rope_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary position embedding."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    moe_every: int = Field(default=1, gt=0)
    """Every n-th layer is MoE, counted from the first group's last layer (2: layers 1, 3, 5, ...)."""
    batch_invariant: bool = False
    """In evaluation a token's logits are the same to the bit in every batch; slower. No effect in training."""
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

    @property
    def moe_layer(self) -> MoEConfig:
        """The mixture-of-experts layers as the model builds them: batch_invariant if the model is."""
        if not self.batch_invariant or self.moe.batch_invariant:
            return self.moe
        return self.moe.model_copy(update={"batch_invariant": True})

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts; 0 for a dense model."""
        return self.num_layers // self.moe_every if self.moe.num_experts else 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_attention()
        self._check_experts()
        if self.batch_invariant and self.moe.num_experts:
            self.moe.check_invariant(under=("moe",))
        return self

    def _check_attention(self) -> None:
        if self.head_dim is None and self.dim % self.num_heads:
            raise FieldError(
                "num_heads",
                self.num_heads,
                f"must divide dim, {self.dim}",
                "choose a divisor or set head_dim",
            )
        head_dim = self.head_dim if self.head_dim is not None else self.dim // self.num_heads
        if head_dim % 2:
            where: Location = ("head_dim",) if self.head_dim is not None else ("num_heads",)
            value = self.head_dim if self.head_dim is not None else self.num_heads
            raise FieldError(
                where,
                value,
                f"rotary positions need an even head size, this gives {head_dim}",
                "set head_dim to an even number",
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise FieldError(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads, {self.num_heads}",
                "choose a divisor",
            )

    def _check_experts(self) -> None:
        given = len(self.moe.num_experts)
        if given and self.moe_every > self.num_layers:
            raise FieldError(
                "moe_every",
                self.moe_every,
                f"must be at most num_layers, {self.num_layers}",
                "lower it, or give no moe.num_experts for a dense model",
            )
        if given not in (0, 1, self.num_moe_layers):
            raise FieldError(
                ("moe", "num_experts"),
                self.moe.num_experts,
                f"must have one entry, or one per MoE layer ({self.num_moe_layers}), has {given}",
                "add or remove entries, or change num_layers or moe_every",
            )
