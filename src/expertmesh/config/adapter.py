"""Options of low-rank adapters in a training run."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.config.fields import Spelling
from expertmesh.errors import named

Kind = Literal["none", "lora"]
LEARNING_RATE = 2e-4
"""Learning rate of adapters where none is given: about ten times the rate of all weights ("LoRA Without Regret",
2025)."""


class AdapterConfig(Config):
    """Low-rank adapters (LoRA), trained on frozen weights."""

    kind: Kind = "none"
    """Trained part: all weights (none), or low-rank adapters on frozen weights (lora: Hu et al. 2022)."""
    init_from: Annotated[str | None, Spelling("DIR")] = None
    """Adapters to begin with: a run with adapters on the same base, or a folder of peft; their rank may be lower."""
    rank: int = Field(default=16, gt=0)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """LoRA alpha: adapters are scaled by alpha / rank."""
    rslora: bool = False
    """Whether adapters are scaled by alpha / sqrt(rank) (rsLoRA)."""
    expert_rank: int | None = Field(default=None, gt=0)
    """Rank of the adapters of routed experts; none: rank / top_k, at least 1, which gives a token the same active rank
    as in dense layers."""
    dropout: float = Field(default=0.0, ge=0, le=0.99)
    """Dropout probability on the inputs of adapters in training; not with experts among the targets."""
    targets: Annotated[tuple[str, ...], Spelling("NAME")] = (
        "attention",
        "dense",
        "shared",
        "experts",
    )
    """Matrices with adapters: attention, dense, shared, experts, head; or module names, such as o_proj or
    mlp.experts.down_proj."""
    shared: bool = False
    """Whether all experts of a layer share one adapter."""
    learn_routers: bool = False
    """Whether the routers are trained too, in full, with the balance loss."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require_once("targets")
        if self.kind == "none":
            for name in type(self).model_fields:
                fix = f"leave it out, or give {named('adapter.kind', 'lora')}"
                self.refuse_idle(name, f"has no effect with {named('adapter.kind', 'none')}", fix)
        self.require(self.targets, "targets", "names nothing", "name attention, for example")
        return self

    @property
    def rests(self) -> bool:
        """Whether the model's weights rest."""
        return self.kind != "none"

    @property
    def routers_rest(self) -> bool:
        """Whether routers rest with the weights, and balance losses are off."""
        return self.rests and not self.learn_routers

    def expert_rank_of(self, top_k: int) -> int:
        """Rank of the adapters of routed experts of which a token uses `top_k`."""
        return self.expert_rank or max(1, self.rank // max(top_k, 1))

    def scaling(self, rank: int) -> float:
        """Scale of an adapter of a rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


def with_learning_rate(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes to a recipe, with the learning rate of adapters where they are asked for and none is given."""
    is_given = "optim" in changes or "optim.lr" in changes
    if is_given or changes.get("adapter.kind") in (None, "none"):
        return dict(changes)
    return {**changes, "optim.lr": LEARNING_RATE}
