"""Faster ways to compute a step than calling the model: an optional part of the package registers them when it is
imported."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.engine.step_tensors import Padding, StepBatch, StepTensors
from expertmesh.errors import ConfigError

OPTIONAL = "expertmesh.cpu"
"""Package that may be missing; everything is computed without it, more slowly."""


class Computed(NamedTuple):
    """Results of a step on the device."""

    logits_RV: Tensor  # (R, V) logits of the rows
    ids_of_layers: list[Tensor]  # (T, K) expert ids of each layer that has experts
    # tokens drawn by the step's sampling parameters alone, see `drawn_of`; None: none are drawn yet
    drawn_3R: Tensor | None = None

    def first(self, num: int) -> Self:
        """Results without padding, which is behind the first tokens."""
        drawn = None if self.drawn_3R is None else self.drawn_3R[:, :num]
        ids = [ids_TK[:num] for ids_TK in self.ids_of_layers]
        return self._replace(logits_RV=self.logits_RV[:num], ids_of_layers=ids, drawn_3R=drawn)


class FasterForward(Protocol):
    """Forward pass of a model for a step."""

    problem: str  # why it does not serve, in one line; empty: it does
    pads: bool  # whether it pads steps, so that the cache needs a spare block

    @property
    def description(self) -> str:
        """See the class."""

    def padding(self, batch: StepBatch) -> Padding | None:
        """Sizes to which a step is padded; None: it is not."""

    def __call__(self, step: StepTensors, context: Any, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """Results of a step; None: `forward`, the model, computes this step."""

    def compile_all(self, forward: Callable[[StepTensors], Computed]) -> None:
        """Prepare every kind of step that can be, and wait."""


FASTER: list[Callable[[Any, EngineConfig], FasterForward | None]] = []
"""Functions of a model and the engine's options; the first result that is not None computes."""


def faster_forward(
    model: Any,
    config: EngineConfig,
    *,
    optional: str = OPTIONAL,
    known: Sequence[Callable[[Any, EngineConfig], FasterForward | None]] = FASTER,
) -> FasterForward | None:
    """Faster forward pass of a model, of those that are known once the optional package is imported; None: there is
    none."""
    if find_spec(optional) is not None:
        import_module(optional)
    if config.compile and not known:
        raise ConfigError("compile", True, f"needs the package {optional}, which is not here", "leave it out")
    found = (make(model, config) for make in known)
    return next((one for one in found if one is not None), None)
