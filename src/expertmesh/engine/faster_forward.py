"""Faster ways to compute a step than calling the model: an optional part of the package registers them when it is imported."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.errors import ConfigError

OPTIONAL = "expertmesh.cpu"
"""Package that may be missing; everything is computed without it, more slowly."""


class FasterForward(Protocol):
    """Forward pass of a model for a step.

    Attributes:
        problem: why it does not serve, in one line; empty: it does.
    """

    problem: str

    def __call__(
        self, ids_T: Tensor, context: Any, rows_R: Tensor
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Logits (R, V), and (T, K) expert ids of each layer that has experts; None: the model computes this step."""

    def compile_all(self) -> None:
        """Prepare every kind of step, and wait."""


FASTER: list[Callable[[Any, EngineConfig], FasterForward | None]] = []
"""Functions of a model and the engine's options; the first result that is not None computes."""


def faster_forward(
    model: Any,
    config: EngineConfig,
    *,
    optional: str = OPTIONAL,
    known: Sequence[Callable[[Any, EngineConfig], FasterForward | None]] = FASTER,
) -> FasterForward | None:
    """Faster forward pass of a model, of those that are known once the optional package is imported; None: there is none.

    Raises:
        ConfigError: compile=True, but the model's steps cannot be compiled.
    """
    if find_spec(optional) is not None:
        import_module(optional)
    if config.compile and not known:
        raise ConfigError(
            "compile", True, f"needs the package {optional}, which is not here", "leave it out"
        )
    found = (make(model, config) for make in known)
    return next((one for one in found if one is not None), None)
