"""Options of the weights that rest under adapters: how they are stored."""

from typing import Literal, Self

from pydantic import model_validator

from expertmesh.config.base import Config
from expertmesh.errors import named

Storage = Literal["auto", "float32", "bfloat16", "int8", "int4", "nf4", "fp8", "mxfp4"]
QUANTIZED = ("int8", "int4", "nf4", "fp8", "mxfp4")
"""Storages of the routed experts' matrices; all other weights then have the type of the products."""
GROUPED = ("int4", "nf4")
"""Storages with a scale per group of columns."""
IDLE_BASE = (
    "is for weights that rest under adapters",
    f"leave it out, or give {named('adapter.kind', 'lora')}",
)
"""Rule and fix of a storage where all weights learn."""


class FrozenBaseConfig(Config):
    """Storage of the weights that rest under adapters."""

    storage: Storage = "auto"
    """Format of resting weights: float32; bfloat16; or of the routed experts' matrices, rounded expert by expert while they are read: int8, int4, nf4, fp8, mxfp4, the others in the type of the products; auto: as the folder has them packed, else the type of the products."""
    group_size: Literal[32, 64, 128] = 64
    """Input columns per scale of int4 and nf4."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.storage not in GROUPED:
            rule = f"has no effect with {named('base.storage', self.storage)}"
            self.refuse_idle("group_size", rule, f"use {named('base.storage', 'int4')}")
        return self
