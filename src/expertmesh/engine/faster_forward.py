"""Faster ways to compute a step than calling the model, on a GPU and on a CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from expertmesh.engine.step_tensors import Padding, StepBatch, StepTensors
from expertmesh.models.decoder import LanguageModel
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.layer import MoELayer


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

    pads: bool  # whether it pads steps, so that the cache needs a spare block

    @property
    def description(self) -> str:
        """See the class."""

    def padding(self, batch: StepBatch) -> Padding | None:
        """Sizes to which a step is padded; None: it is not."""

    def __call__(self, step: StepTensors, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """Results of a step; None: `forward`, the model, computes this step."""

    def compile_all(self, forward: Callable[[StepTensors], Computed]) -> None:
        """Prepare every kind of step that can be, and wait."""


def why_not_repeated(model: Any) -> str:
    """Reason why a model's steps can be repeated on no device, as a continuation of "compile=True"; empty: there is
    none."""
    if not isinstance(model, LanguageModel):
        return "is for models of ours"
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
        return "is for models on one rank"
    if any(layer.grouped is not None and layer.grouped.paging is not None for layer in layers):
        return "is for experts that are not in slots: each layer waits for its choices"
    return ""
