"""The options of a mixture-of-experts layer and all their rules, for `MoELayer` and configurations alike.

A rule about one option is its type. Rules about several options are the checks of `LayerChoices` and the table
`NO_EFFECT`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.config.values import LEAST_INT64, MOST_INT64, python_number

Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "relu2", "silu", "clamped_swiglu"]
ScoreFunction = Literal["softmax", "sigmoid", "softmax_after_topk"]
RouterKind = Literal["topk", "cosine", "expert_choice", "hash"]
RouterNoise = Literal["none", "gumbel", "gaussian", "gumbel_after_first"]
NormalizeWeights = Literal["auto", "none", "topk", "kept"]
GroupScore = Literal["top2_sum", "max"]
DropPolicy = Literal["first", "priority", "weight", "random"]
BalanceLoss = Literal["switch", "gshard", "importance_load", "none"]
LossScope = Literal["group", "global"]
Backend = Literal["auto", "triton", "torch", "reference"]

CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702
"""Constants of clamped_swiglu: the bound of the gate and of the size of up, and the factor inside the sigmoid."""
GROUP_SCORES = {"top2_sum": 2, "max": 1}
"""Number of best scores whose sum is the score of a group of experts."""
MOST_FACTOR = 1e6
"""Largest capacity factor; a factor of num_experts drops nothing already."""
_FACTORS = ("capacity_factor", "eval_capacity_factor", "max_capacity_factor")


class LayerChoices(Config):
    """Options that a layer and a model's configuration share; the names are the keywords of `expertmesh.MoELayer`."""

    num_experts: Any
    """Number of experts (E)."""
    top_k: int = Field(default=2, gt=0)
    """Number of experts per token (K)."""
    hidden_dim: int = Field(default=512, gt=0)
    """Hidden size of an expert (F)."""
    router: RouterKind = "topk"
    """Router: tokens choose experts (topk, cosine), experts choose tokens (expert_choice), or a hash of the token
    ids."""
    score_function: ScoreFunction = "softmax"
    """Score function applied to router logits."""
    normalize_weights: NormalizeWeights = "auto"
    """Divisor of routing weights: their sum over the top-k experts (topk), or over the ones that had capacity for the
    token (kept); auto: topk if top_k > 1."""
    weight_scale: float = Field(default=1.0, gt=0)
    """Factor on the routing weights (routed_scaling_factor of DeepSeek)."""
    router_noise: RouterNoise = "none"
    """Noise on the logits in training: gumbel (DeepSpeed's RSample), gaussian (Tutel's gate noise), or
    gumbel_after_first, on all but the best logit (DeepSpeed's sampling of the second expert)."""
    router_noise_std: float = Field(default=1.0, ge=0)
    """Standard deviation (scale) of the router noise."""
    input_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Router input jitter in training: inputs are multiplied by uniform factors in 1 +- this."""
    input_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the router input, in training."""
    expert_output_masking: float = Field(default=0.0, ge=0, lt=1)
    """Probability in training that an expert's output for a token is dropped (expert output masking of NLLB)."""
    logit_temperature: float = Field(default=1.0, gt=0)
    """Temperature of the router: divisor of its logits."""
    num_expert_groups: int = Field(default=1, gt=0)
    """Number of expert groups for group-limited (node-limited) routing; 1: no limit."""
    num_limited_groups: int = Field(default=1, gt=0)
    """Number of expert groups that a token may be routed to (DeepSeek's topk_group)."""
    group_score: GroupScore = "top2_sum"
    """Score of a group: the sum of its two best scores (top2_sum, DeepSeek-V3), or the best one (max, DeepSeek-V2)."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Update rate of the bias for loss-free balancing (DeepSeek-V3); 0: no bias."""
    cosine_dim: int = Field(default=256, gt=0)
    """Projection size of the cosine router."""
    capacity_factor: float | None = Field(default=None, gt=0, le=MOST_FACTOR)
    """Capacity factor in training: maximum number of tokens per expert / (tokens * top_k / experts); none: dropless."""
    eval_capacity_factor: float | None = Field(default=None, gt=0, le=MOST_FACTOR)
    """Capacity factor in evaluation; none: dropless."""
    min_capacity: int = Field(default=4, ge=0, lt=2**31)
    """Minimum capacity of an expert in tokens, per routing group."""
    max_capacity_factor: float | None = Field(default=None, gt=0, le=MOST_FACTOR)
    """Upper bound on both capacity factors, which limits dropless layers too; none: no bound."""
    drop_policy: DropPolicy = "random"
    """Tokens that an expert over capacity keeps: the first ones (first), the ones with the highest score (priority) or
    routing weight (weight), or random ones (random)."""
    routing_group_size: int | None = Field(default=None, gt=0)
    """Number of tokens per routing group, for capacity and balance loss; none: the whole micro-batch."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Number of shared experts, which process every token."""
    shared_hidden_dim: int | None = Field(default=None, gt=0)
    """Hidden size of the shared experts' MLP; none: num_shared_experts * hidden_dim."""
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by a learned sigmoid gate (Qwen2-MoE)."""
    residual: bool = False
    """Whether a dense MLP beside the experts is mixed in by a learned coefficient (residual MoE of PR-MoE)."""
    balance_loss: BalanceLoss = "switch"
    """Load-balancing loss: Switch's over all choices (switch), GShard's over first choices (gshard), or the importance
    and load losses of Shazeer et al. 2017 (importance_load)."""
    balance_loss_scope: LossScope = "group"
    """Scope of the balance loss: each routing group, or the global batch."""
    aux_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the balance loss."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss."""
    bias: bool = False
    """Whether experts have biases."""
    router_bias: bool = False
    """Whether the router's linear layer has a learned bias (not the balancing bias of bias_update_rate)."""
    recompute_h: bool = False
    """Whether the experts' pre-activations are recomputed in the backward pass: less memory, more time."""
    backend: Backend = "auto"
    """Implementation of the expert operators."""
    batch_invariant: bool = False
    """Whether outputs in evaluation are bitwise the same in every batch; slower."""

    @property
    @abstractmethod
    def expert_counts(self) -> tuple[int, ...]:
        """Number of experts of each layer that these options are for; empty: no layer has experts."""

    @property
    def is_dropless(self) -> bool:
        """Whether no capacity is set."""
        return all(getattr(self, name) is None for name in _FACTORS)

    @property
    def dropless_factor(self) -> float | None:
        """Capacity factor of a call that drops no token; None for expert_choice, where experts always have a
        capacity."""
        return None if self.router == "expert_choice" else math.inf

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.expert_counts:
            self._check_counts(min(self.expert_counts))
        self.require(
            self.num_limited_groups <= self.num_expert_groups,
            "num_limited_groups",
            f"must be at most num_expert_groups, {self.num_expert_groups}",
            "lower it or raise num_expert_groups",
        )
        self.require(
            self.router != "expert_choice" or self.score_function != "softmax_after_topk",
            "score_function",
            "needs tokens that choose, and with router=expert_choice experts choose",
            "use softmax or sigmoid",
        )
        self.require(
            self.router != "expert_choice" or self.balance_loss != "gshard",
            "balance_loss",
            "counts the first choices of tokens, and with router=expert_choice experts choose",
            "use switch",
        )
        if self.router_noise == "gumbel_after_first":
            self._check_first_choice()
        if self.batch_invariant:
            self.check_invariant()
        self._check_effects()
        return self

    def _check_counts(self, fewest: int) -> None:
        self.require(
            self.top_k <= fewest,
            "top_k",
            f"must be at most the fewest experts of a layer, {fewest}",
            "lower top_k or raise num_experts",
        )
        for num_experts in self.expert_counts:
            self.require(
                num_experts % self.num_expert_groups == 0,
                "num_expert_groups",
                f"must divide the number of experts, {num_experts}",
                "choose a divisor",
            )
        reachable = self.num_limited_groups * (fewest // self.num_expert_groups)
        self.require(
            self.num_expert_groups == 1 or self.top_k <= reachable,
            "top_k",
            f"must be at most the experts in num_limited_groups={self.num_limited_groups} groups, {reachable}",
            "lower top_k or raise num_limited_groups",
        )

    def _check_first_choice(self) -> None:
        """Refuse options by which a token's best logit is not its first choice, for router_noise=gumbel_after_first."""
        decides = {
            "router=expert_choice": self.router == "expert_choice",
            "bias_update_rate": self.bias_update_rate > 0,
            "num_expert_groups": self.num_expert_groups > 1,
            "top_k=1": self.top_k == 1,
        }
        for name, it_does in decides.items():
            self.require(
                not it_does,
                "router_noise",
                f"needs further choices after a first one by the logits alone, which {name} rules out",
                "use gumbel",
            )

    def _check_effects(self) -> None:
        for row in NO_EFFECT:
            if not row.where(self):
                continue
            for name in row.names or [n for n in type(self).model_fields if n != "num_experts"]:
                field = type(self).model_fields.get(name)
                if field is not None and getattr(self, name) != _OFF.get(name, field.default):
                    rule = f"has no effect {row.because.format(**vars(self))}"
                    self.refuse_idle(name, rule, f"leave it at {field.default}")

    def check_invariant(self) -> None:
        """Refuse options that make a token's result depend on its batch in evaluation."""
        for name in _FACTORS[1:]:
            check_invariant_factor(name, getattr(self, name))
        self.require(
            self.router != "expert_choice",
            "router",
            "lets experts choose among the tokens of the batch, which batch_invariant rules out",
            "use another router, or leave batch_invariant out",
        )
        self.require(
            self.backend != "reference",
            "backend",
            "orders its sums by the batch, which batch_invariant rules out",
            "use auto, torch or triton, or leave batch_invariant out",
        )


def check_invariant_factor(name: str, value: float | None) -> None:
    """Refuse a capacity factor that counts in evaluation, for a layer with batch_invariant.

    Args:
        value: the factor; None and inf mean dropless.
    """
    if value is not None and not math.isinf(value):
        raise FieldError(
            name,
            value,
            "makes drops in evaluation depend on the batch, which batch_invariant rules out",
            f"leave {name} out, or batch_invariant",
        )


class LayerOptions(LayerChoices):
    """The options of one layer that are numbers, words and switches: the keywords of `MoELayer` without modules and
    tensors.

    Numbers of NumPy count as numbers; nothing else is converted. A capacity factor of inf is None.
    """

    model_config = ConfigDict(strict=True)

    num_experts: int = Field(gt=0)
    """Number of experts (E)."""
    dim: int = Field(gt=0)
    """Size of a token (D)."""
    activation: Activation = "swiglu"
    """Activation of the experts, the shared experts and the residual MLP."""
    residual_hidden_dim: int | None = Field(default=None, gt=0)
    """Hidden size of the residual MLP; none: hidden_dim."""
    seed: int | None = Field(default=None, ge=LEAST_INT64, le=MOST_INT64)
    """Seed of the initial weights and the hash."""
    layer_index: int = Field(default=0, ge=0)
    """Index of the layer in its model."""
    own_router: bool = False
    """Whether the router is a module of the user's; `router` is then not read."""
    own_experts: bool = False
    """Whether the experts are modules of the user's."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Number of experts of the layer."""
        return (self.num_experts,)

    @property
    def router_kind(self) -> str:
        """The router: a `RouterKind`, or "module" for a router of the user's."""
        return "module" if self.own_router else self.router

    @property
    def noise_kind(self) -> str:
        """The noise on the logits in training: a `RouterNoise`, "none" where it has no scale."""
        return self.router_noise if self.router_noise_std > 0 else "none"

    @property
    def needs_noise(self) -> bool:
        """Whether training draws random numbers before the choice."""
        return self.noise_kind != "none" or self.input_jitter > 0 or self.input_dropout > 0

    @property
    def has_losses(self) -> bool:
        """Whether one of the losses has a weight."""
        return bool(self.aux_loss_weight or self.z_loss_weight)

    @property
    def loss_group_size(self) -> int | None:
        """Tokens over which the balance loss counts; None: all of the call, on all processes."""
        return None if self.balance_loss_scope == "global" else self.routing_group_size

    def normalizes(self, top_k: int) -> bool:
        """Whether weights are divided by their sum over the chosen experts."""
        if self.normalize_weights == "auto":
            return top_k > 1 and self.router != "expert_choice"
        return self.normalize_weights in ("topk", "kept")

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, values: dict[str, Any]) -> dict[str, Any]:
        plain = {name: python_number(value) for name, value in values.items()}
        return plain | {name: None for name in _FACTORS if plain.get(name) == math.inf}

    def check_invariant(self) -> None:
        """Refuse options and modules that make a token's result depend on its batch in evaluation."""
        for name, is_own in (("router", self.own_router), ("experts", self.own_experts)):
            if is_own:
                raise FieldError(
                    name,
                    "a module of your own",
                    "orders its sums itself, and batch_invariant needs sums that the layer orders",
                    f"leave {name} out, or batch_invariant",
                )
        super().check_invariant()


@dataclass(frozen=True)
class NoEffect:
    """Options that change nothing under a condition, so that a value other than the default is a mistake."""

    names: tuple[str, ...]  # names of the options; none: all but num_experts
    where: Callable[[Any], bool]  # the condition on the other options
    because: str  # the condition in words; {option} stands for an option's value


def _has_router(router: RouterKind, choices: LayerChoices) -> bool:
    return choices.router == router


NOT_READ_BY: dict[RouterKind, tuple[str, ...]] = {
    "topk": ("cosine_dim",),
    "cosine": ("router_bias",),
    "expert_choice": ("cosine_dim", "num_expert_groups", "bias_update_rate"),
    "hash": (
        *("cosine_dim", "num_expert_groups", "bias_update_rate", "score_function", "router_bias"),
        *("router_noise", "input_jitter", "input_dropout", "logit_temperature"),
        *("balance_loss", "balance_loss_scope", "aux_loss_weight", "z_loss_weight"),
    ),
}
"""Options without effect, by router. A hash of ids has neither logits nor scores to perturb or balance."""

_OFF = {"balance_loss": "none", "aux_loss_weight": 0.0}
"""Values that switch an option off, and are accepted beside its default."""

NO_EFFECT = (
    NoEffect((), lambda c: not c.expert_counts, "in a dense model (num_experts is empty)"),
    *(
        NoEffect(names, partial(_has_router, router), "with router={router}")
        for router, names in NOT_READ_BY.items()
        if names
    ),
    NoEffect(("router_noise_std",), lambda c: c.router_noise == "none", "with router_noise=none"),
    NoEffect(
        ("min_capacity", "drop_policy"),
        # a layer's caller may give a capacity per call
        lambda c: not isinstance(c, LayerOptions) and (c.is_dropless or c.router == "expert_choice"),
        "without capacity_factor, eval_capacity_factor or max_capacity_factor, or with router=expert_choice",
    ),
    NoEffect(("group_score",), lambda c: c.num_expert_groups == 1, "with num_expert_groups=1"),
    NoEffect(
        ("shared_gate",),
        lambda c: not c.num_shared_experts and not c.shared_hidden_dim,
        "without shared experts",
    ),
    NoEffect(("residual_hidden_dim",), lambda c: not c.residual, "with residual=False"),
    NoEffect(("recompute_h",), lambda c: getattr(c, "own_experts", False), "on experts of your own"),
)
"""Options of a layer that change nothing, each with its condition."""
