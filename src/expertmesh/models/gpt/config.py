"""Options of a GPT, and the complete configuration of its training on text."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError, expanded
from expertmesh.config.latent import LatentAttentionConfig, RopeScalingConfig
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import Activation
from expertmesh.config.objective import LEARNING_RATES, ObjectiveConfig
from expertmesh.config.rl import RewardConfig, RLConfig, check_rl, options_of_rl
from expertmesh.config.run import RunConfig
from expertmesh.config.text import TextConfig
from expertmesh.config.tokens import TokensConfig
from expertmesh.errors import named

MIN_VOCAB_SIZE = 257


class ModelConfig(Config):
    """A GPT: RMSNorm, RoPE, grouped-query attention, and MoE in every n-th layer."""

    vocab_size: int = Field(default=4096, gt=0, lt=2**31)
    """Vocabulary size (V)."""
    max_seq_len: int = Field(default=256, gt=0)
    """Maximum sequence length in tokens (S)."""
    dim: int = Field(default=256, gt=0)
    """Model width (D)."""
    num_layers: int = Field(default=6, gt=0, le=100_000)
    """Number of transformer layers."""
    num_heads: int = Field(default=4, gt=0)
    """Number of attention heads (H)."""
    num_kv_heads: int | None = Field(default=None, gt=0)
    """Number of key-value heads (grouped-query attention); none: num_heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Head size; none: dim / num_heads."""
    ffn_hidden_dim: int = Field(default=1024, gt=0)
    """Hidden size of the dense feed-forward layers, and of the residual MLP of a residual MoE layer."""
    activation: Activation = "swiglu"
    """Activation of experts and dense feed-forward layers."""
    qk_norm: bool = False
    """Whether queries and keys are normalized by RMSNorm."""
    qk_norm_scope: Literal["head", "projection"] = "head"
    """Scope of the norms of qk_norm: each head (head), or the whole projection (projection, as in OLMoE)."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    out_bias: bool = False
    """Whether the output projection of attention has a bias."""
    sinks: bool = False
    """Whether attention has a learned sink logit per head, as in gpt-oss."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Sliding window of attention in tokens, the token itself included; none: no window."""
    full_attention_every: int | None = Field(default=None, gt=1)
    """Interval of layers with full attention (2: layers 1, 3, 5, ..., counted from 0); others have sliding_window;
    none: all have it."""
    tie_embeddings: bool = True
    """Whether input embedding and output projection share a matrix."""
    rope_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary position embedding."""
    rope_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head's dimensions with rotary positions."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    moe_every: int = Field(default=1, gt=0)
    """Interval of MoE layers (1: all layers; 2: layers 1, 3, 5, ..., counted from 0)."""
    first_dense_layers: int = Field(default=0, ge=0)
    """Number of dense layers at the beginning, before moe_every applies."""
    batch_invariant: bool = False
    """Whether logits in evaluation are bitwise the same in every batch; slower; no effect in training; includes
    moe.batch_invariant."""
    end_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """EOS token ids in addition to the tokenizer's; set by convert."""
    start_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """BOS token ids, prepended to prompts; set by convert; none: the tokenizer's BOS token, else its EOS token."""
    latent: LatentAttentionConfig = LatentAttentionConfig()
    """Multi-head latent attention, as in DeepSeek-V2."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Scaling of rotary positions to longer sequences."""
    moe: MoEConfig = MoEConfig()
    """The mixture-of-experts layers."""

    @property
    def is_latent(self) -> bool:
        """Whether the attention is multi-head latent attention."""
        return self.latent.kv_lora_rank is not None

    @property
    def cache_heads(self) -> int:
        """Key heads per token in a cache."""
        return 1 if self.is_latent else self.kv_heads

    @property
    def cache_size(self) -> int:
        """Size of a key head in a cache; latent attention stores one vector, which is key and value."""
        rank = self.latent.kv_lora_rank
        return self.head_size if rank is None else rank + self.latent.qk_rope_head_dim

    @property
    def cache_numbers(self) -> int:
        """Numbers that a cache stores per token and layer."""
        return self.cache_heads * self.cache_size * (1 if self.is_latent else 2)

    @property
    def turning_dim(self) -> int:
        """Dimensions of a head that the rotary tables cover."""
        return self.latent.qk_rope_head_dim if self.is_latent else self.head_size

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head's query, resolved."""
        if self.is_latent:
            return self.latent.qk_head_dim
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Attention window of a layer in tokens; None: all tokens before."""
        every = self.full_attention_every
        sees_all = every is not None and layer % every == every - 1
        return None if sees_all else self.sliding_window

    def experts_per_layer(self) -> tuple[int, ...]:
        """Number of experts of every layer; 0 where the feed-forward is dense."""
        counts = self.moe.num_experts
        if len(counts) == 1:
            counts = counts * self.num_moe_layers
        experts = dict(zip(self._moe_layers(), counts, strict=True)) if counts else {}
        return tuple(experts.get(i, 0) for i in range(self.num_layers))

    @property
    def choosing_group(self) -> int:
        """Number of tokens from which experts choose, whose multiples the ranks' parts of a sequence are; 1: any
        number."""
        experts_choose = any(self.experts_per_layer()) and self.moe.router == "expert_choice"
        return self.moe.routing_group_size or 1 if experts_choose else 1

    def _moe_layers(self) -> list[int]:
        layers = range(self.first_dense_layers, self.num_layers)
        return [i for i in layers if i % self.moe_every == self.moe_every - 1]

    @property
    def moe_layer(self) -> MoEConfig:
        """The mixture-of-experts layers as the model builds them: batch_invariant if the model is."""
        if not self.batch_invariant or self.moe.batch_invariant:
            return self.moe
        return self.moe.model_copy(update={"batch_invariant": True})

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts; 0 for a dense model."""
        return len(self._moe_layers()) if self.moe.num_experts else 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_attention()
        self._check_experts()
        for name in ("end_ids", "start_ids"):
            self.require(
                all(token_id < self.vocab_size for token_id in getattr(self, name) or ()),
                name,
                f"must be below vocab_size, {self.vocab_size}",
                "lower them",
            )
        if self.batch_invariant and self.moe.num_experts:
            try:
                self.moe.check_invariant()
            except FieldError as error:
                raise error.inside(("moe",)) from None
        return self

    def _check_attention(self) -> None:
        if self.is_latent:
            for name in (
                *("num_kv_heads", "head_dim", "qk_norm", "qk_norm_scope", "qkv_bias"),
                *("rope_fraction", "out_bias", "sinks", "sliding_window", "full_attention_every"),
            ):
                fix = "leave it out, or latent.kv_lora_rank"
                self.refuse_idle(name, "has no effect with latent attention", fix)
            return
        self.require(
            not self.rope_scaling.mscale_all_dim or bool(self.rope_scaling.mscale),
            "rope_scaling.mscale_all_dim",
            "scales the scores of latent attention only",
            "set mscale too, or leave it out",
        )
        self.require(
            self.head_dim is not None or self.dim % self.num_heads == 0,
            "num_heads",
            f"must divide dim, {self.dim}",
            "choose a divisor or set head_dim",
        )
        size = self.head_size
        self.require(
            size % 2 == 0,
            "num_heads" if self.head_dim is None else "head_dim",
            f"rotary positions need an even head size, this gives {size}",
            "set head_dim to an even number",
        )
        if not self.qk_norm:
            fix = "leave it at head, or set qk_norm"
            self.refuse_idle("qk_norm_scope", "has no effect without qk_norm", fix)
        if self.sliding_window is None:
            fix = "leave it out, or set sliding_window"
            self.refuse_idle("full_attention_every", "has no effect without sliding_window", fix)
        turning = size * self.rope_fraction
        self.require(
            turning % 2 == 0,
            "rope_fraction",
            f"must turn an even number of the {size} dimensions of a head, not {turning:g}",
            f"use a multiple of {2 / size:g}",
        )
        self.require(
            self.num_heads % self.kv_heads == 0,
            "num_kv_heads",
            f"must divide num_heads, {self.num_heads}",
            "choose a divisor",
        )

    def _check_experts(self) -> None:
        given = len(self.moe.num_experts)
        self.require(
            not given or self.moe_every <= self.num_layers,
            "moe_every",
            f"must be at most num_layers, {self.num_layers}",
            "lower it, or give no moe.num_experts for a dense model",
        )
        self.require(
            not self.first_dense_layers or self.num_moe_layers,
            "first_dense_layers",
            "leaves no layer with experts",
            "lower it, or leave it out of a dense model",
        )
        self.require(
            given in (0, 1, self.num_moe_layers),
            "moe.num_experts",
            f"must have one entry, or one per MoE layer ({self.num_moe_layers}), has {given}",
            "add or remove entries, or change num_layers or moe_every",
        )


class GPTRunConfig(RunConfig):
    """Complete configuration of a training run of a GPT."""

    family: str = "gpt"
    """Family of the model: gpt, or module:name of your own."""
    model: ModelConfig = ModelConfig()
    data: TextConfig = TextConfig()
    tokens: TokensConfig = TokensConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    rl: RLConfig = RLConfig()
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_rl(self)
        self._check_tokens()
        if self.train.init_from is None:  # else the model is still to come: `begun_with` checks
            self.check_fits()
        return self

    def _check_tokens(self) -> None:
        if not self.tokens.add:
            return
        for fits, rule, fix in (
            (
                self.train.init_from is not None,
                f"needs a trained model, and {named('train.init_from')} names none",
                "write its folder in place of the recipe",
            ),
            (
                self.objective.name != "grpo",
                f"adds tokens that no answer has yet, and {named('objective.name', 'grpo')} learns from answers",
                f"add them with {named('objective.name', 'sft')} first, and name its folder in the place of the recipe",
            ),
            (
                self.data.tokenizer is None,
                f"adds tokens that the .bin files of {named('data.tokenizer')} lack",
                "give text, or leave it out",
            ),
        ):
            self.require(fits, "tokens.add", rule, fix)

    def check_fits(self) -> None:
        """Refuse options of the run that do not fit its model."""
        self.require(
            self.data.seq_len <= self.model.max_seq_len,
            "data.seq_len",
            f"must be at most {named('model.max_seq_len')}, {self.model.max_seq_len}",
            f"lower it or raise {named('model.max_seq_len')}",
        )
        self.require(
            self.model.vocab_size >= MIN_VOCAB_SIZE,
            "model.vocab_size",
            f"must be at least {MIN_VOCAB_SIZE}: the 256 bytes and the end of a document",
            "raise it",
        )
        for name in ("document_mask", "pack"):
            self.require(
                not (getattr(self.data, name) and self.model.batch_invariant),
                f"data.{name}",
                f"conflicts with {named('model.batch_invariant')}, whose positions begin with a sequence's first token",
                "leave one of the two out",
            )
        self.require(
            self.objective.name in ("auto", "lm", "sft") or self.distill.teacher is None,
            "distill.teacher",
            f"teaches next tokens, and {named('objective.name', self.objective.name)} learns otherwise",
            "leave it out",
        )
        self.require(
            self.objective.name != "grpo" or self.parallel.tp_degree == 1 or not self.rl.exact,
            "parallel.tp_degree",
            f"adds parts of products over ranks, in another order than rollouts do, and {named('rl.exact', True)} "
            "compares the bits",
            f"use 1, or {named('rl.exact', False)}",
        )
        if self.adapter.dropout:
            evaluates = self.objective.name in LEARNING_RATES
            self.require(
                not evaluates,
                "adapter.dropout",
                f"has no effect with {named('objective.name', self.objective.name)}, which computes as in evaluation",
                "leave it out",
            )
            self.require(
                self.parallel.tp_degree == 1,
                "adapter.dropout",
                f"is drawn for whole inputs, and {named('parallel.tp_degree', self.parallel.tp_degree)} cuts them",
                f"use 0, or {named('parallel.tp_degree', 1)}",
            )
        layers, given = self.model.num_moe_layers, len(self.parallel.ep_degree)
        self.require(
            given in (0, 1, layers),
            "parallel.ep_degree",
            f"must have one entry, or one per MoE layer ({layers}), has {given}",
            "give one number for all layers",
        )


def begun_with(config: GPTRunConfig, other: GPTRunConfig) -> GPTRunConfig:
    """The configuration with the model and the tokenizer of the run in train.init_from."""
    where = expanded(config.train.init_from or ".")
    changes = {"model": other.model.model_dump(), "data.encode_with": str(where / "tokenizer.json")}
    if config.objective.name in LEARNING_RATES and not other.model.num_moe_layers:
        changes["train.freeze"] = ()  # by default its routers rest
    found = config.updated(changes)
    found = found.updated(options_of_rl(found))
    found.check_fits()
    return found
