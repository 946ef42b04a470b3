"""Objectives of training: next tokens, or preferences between answers."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.errors import named

ObjectiveName = Literal["auto", "lm", "sft", "dpo", "grpo"]
LossName = Literal[
    "sigmoid",
    "robust",
    "ipo",
    "hinge",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
    "simpo",
    "orpo",
    "cpo",
]
Reference = Literal["start", "none"]


class LossOptions(NamedTuple):
    """Options of a preference loss."""

    beta: float = 0.1  # usual `objective.beta`
    reads: tuple[str, ...] = ("reference",)  # further options that change it
    sft_weight: float = 0.0  # usual `objective.sft_weight`
    gamma: float | None = None  # usual `objective.gamma`; None: it has none

    @property
    def has_reference(self) -> bool:
        """Whether the answers' log-probabilities under a reference enter."""
        return "reference" in self.reads


LOSS_OPTIONS: dict[LossName, LossOptions] = {
    "sigmoid": LossOptions(reads=("reference", "label_smoothing")),
    "robust": LossOptions(reads=("reference", "label_smoothing")),
    "ipo": LossOptions(),
    "hinge": LossOptions(),
    "apo_zero": LossOptions(),
    "apo_down": LossOptions(),
    "sigmoid_norm": LossOptions(),
    "simpo": LossOptions(beta=2.0, reads=("gamma",), gamma=1.0),
    "orpo": LossOptions(reads=(), sft_weight=1.0),
    "cpo": LossOptions(reads=(), sft_weight=1.0),
}
"""Options of each loss on pairs; `expertmesh.objectives.preferences` has the formulas."""


class ObjectiveConfig(Config):
    """Training objective: language modelling, SFT, DPO or GRPO."""

    name: ObjectiveName = "auto"
    """Objective: lm, next-token prediction on text; sft, loss on assistant tokens only; dpo, preference pairs; grpo,
    rewards of sampled answers; auto: sft for conversations, else lm."""
    loss: LossName = "sigmoid"
    """Preference loss by TRL's names, sigmoid (DPO) first; simpo, orpo and cpo need no reference model."""
    beta: float | None = Field(default=None, gt=0)
    """Beta of the preference loss; none: 0.1, or 2 for simpo."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Label smoothing: assumed fraction of mislabelled pairs, for sigmoid (cDPO) and robust."""
    gamma: float | None = Field(default=None, ge=0)
    """Target reward margin of simpo; none: 1."""
    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of an additional SFT loss on the chosen answers; none: 1 for orpo and cpo, else 0."""
    reference: Reference = "start"
    """Reference model: start, the initial model, whose logprobs are computed once; none, no reference."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name != "dpo":
            rule = f"has no effect with {named('objective.name', self.name)}"
            for name in type(self).model_fields:
                if name != "name":
                    fix = f"leave it out, or use {named('objective.name', 'dpo')}"
                    self.refuse_idle(name, rule, fix)
            return self
        for name in ("label_smoothing", "gamma", "reference"):
            if name not in self.options.reads:
                others = [one for one, row in LOSS_OPTIONS.items() if name in row.reads]
                self.refuse_idle(
                    name,
                    f"has no effect with {named('objective.loss', self.loss)}",
                    f"leave it out, or use {named('objective.loss', others[0])}",
                )
        if self.loss == "robust" and not self.label_smoothing:
            raise FieldError(
                "label_smoothing",
                self.label_smoothing,
                f"must be above 0 with {named('objective.loss', 'robust')}, which is sigmoid without it",
                "give the fraction of wrong pairs, for example 0.1",
            )
        return self

    @property
    def options(self) -> LossOptions:
        """Options of the preference loss."""
        return LOSS_OPTIONS[self.loss]

    @property
    def has_reference(self) -> bool:
        """Whether rewards are relative to a reference's log-probabilities."""
        return self.name == "dpo" and self.options.has_reference and self.reference != "none"

    @property
    def resolved_beta(self) -> float:
        """The factor of the rewards."""
        return self.options.beta if self.beta is None else self.beta

    @property
    def resolved_gamma(self) -> float:
        """The margin; 0 where the loss has none."""
        return (self.options.gamma or 0.0) if self.gamma is None else self.gamma

    @property
    def resolved_sft_weight(self) -> float:
        """The weight of the chosen answers' cross-entropy."""
        return self.options.sft_weight if self.sft_weight is None else self.sft_weight


LEARNING_RATES = {"dpo": (1e-6, 1e-5), "grpo": (1e-6, 1e-5)}
"""Usual learning rates of objectives, of all weights and of adapters, as in TRL; others have the recipe's."""


def with_usual(changes: Mapping[str, Any], *, begins_with: str | None) -> dict[str, Any]:
    """Changes to a recipe, with what is usual for the objective that they name where they say nothing else.

    That is the learning rate and, for a model that was trained already, routers that rest.
    """
    rates = LEARNING_RATES.get(changes.get("objective.name", ""))
    if rates is None:
        return dict(changes)
    has_adapters = changes.get("adapter.kind", "none") != "none"
    usual: dict[str, Any] = {} if "optim" in changes else {"optim.lr": rates[has_adapters]}
    if not has_adapters and (begins_with or changes.get("train.init_from")):
        usual["train.freeze"] = ("router",)
    return {**usual, **changes}
