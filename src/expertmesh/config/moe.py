"""Options of the mixture-of-experts layers of any family's models."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from expertmesh.config.moe_rules import LayerChoices


class MoEConfig(LayerChoices):
    """The mixture-of-experts layers; the names are the keywords of `expertmesh.MoELayer`."""

    num_experts: tuple[Annotated[int, Field(gt=0)], ...] = (8,)
    """Number of experts: one for all MoE layers, or one per MoE layer (a pyramid); none: a dense model."""

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """Experts of each MoE layer, or one number for all; none: a dense model."""
        return self.num_experts

    @model_validator(mode="after")
    def _check_bound(self) -> Self:
        """Refuses a bound below capacity_factor. Only a layer's caller may override the factor per call, a run
        cannot."""
        bound, factor = self.max_capacity_factor, self.capacity_factor
        self.require(
            bound is None or factor is None or bound >= factor,
            "max_capacity_factor",
            f"must be at least capacity_factor, {factor}",
            "raise it or lower capacity_factor",
        )
        return self
