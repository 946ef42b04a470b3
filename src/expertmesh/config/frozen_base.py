"""Options of the frozen weights under adapters: how they are stored."""

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
    "is for frozen weights under adapters",
    f"leave it out, or give {named('adapter.kind', 'lora')}",
)
"""Rule and fix of a storage where all weights learn."""


class FrozenBaseConfig(Config):
    """Storage of the frozen weights under adapters (QLoRA)."""

    storage: Storage = "auto"
    """Storage format of the frozen weights: float32, bfloat16, or a quantized format for routed experts (all others
    then have the compute dtype); auto: the folder's quantized format, else the compute dtype."""
    group_size: Literal[32, 64, 128] = 64
    """Group size of int4 and nf4: number of weights per scale."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.storage not in GROUPED:
            rule = f"has no effect with {named('base.storage', self.storage)}"
            self.refuse_idle("group_size", rule, f"use {named('base.storage', 'int4')}")
        return self
