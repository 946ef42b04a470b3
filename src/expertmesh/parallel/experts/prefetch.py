"""Weights are gathered one layer ahead: of the next layer in the forward, of the layer before in the backward.

The order of the layers is that of the last forward, and a layer's split is guessed: as in its last call, or, where the
layer before has just changed its split, the same change. Ranks that run the same program guess alike, so that they
always start the same collectives. A wrong guess costs one gather in vain; the layer is then not fetched ahead before
a guess would have been right.

At most one layer is fetched ahead, so that the gathered weights of two layers live at a time. Where a layer's
forward is repeated in the backward (activation checkpointing), the repetition and the backward share one gather.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.parallel.experts.route_split import RouteSplit

GatheredTensors = list[tuple[Tensor, ...]]
"""The slices of every parameter, in the order of a storage's names."""

GatherKey = tuple[RouteSplit, torch.dtype]
"""What tells gathers of one layer apart."""


class GatherHandle(Protocol):
    """The weights of one layer on their way."""

    def wait(self) -> GatheredTensors:
        """Wait for them."""


class GatheredLayer(Protocol):
    """A layer whose weights are gathered."""

    def fetch(self, key: GatherKey) -> GatherHandle:
        """Begin to gather."""

    def has_kept(self, key: GatherKey) -> bool:
        """Whether gathered weights are still there and right."""

    def similar_key(self, key: GatherKey) -> GatherKey | None:
        """This layer's key for another layer's route degree and type; None: it cannot route over so many."""

    def versions(self) -> Any:
        """Something that changes when the parameters do."""


@dataclass(frozen=True, eq=False)
class LayerTurn:
    """One layer's turn in a forward, if its backward is going to gather again.

    Attributes:
        layer: it.
        key: of its gather.
        previous: the turn before it in the same forward.
    """

    layer: GatheredLayer
    key: GatherKey
    previous: "LayerTurn | None"


@dataclass(frozen=True)
class _Ahead:
    """A guess, and the gather that was started for it (None: the last guess for this layer was wrong)."""

    layer: GatheredLayer
    key: GatherKey
    versions: Any
    fetch: GatherHandle | None


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Prefetcher:
    """Gathers ahead for the layers of one model."""

    def __init__(self) -> None:
        self._order: list[GatheredLayer] = []
        self._next: dict[GatheredLayer, GatheredLayer] = {}
        self._keys: dict[GatheredLayer, GatherKey] = {}
        self._missed: set[GatheredLayer] = set()
        self._split_changed = False
        self._ahead: _Ahead | None = None
        self._last: LayerTurn | None = None
        self._again: dict[tuple[GatheredLayer, GatherKey], GatherHandle] = {}
        self._task = -1

    def enter(self, layer: GatheredLayer, key: GatherKey) -> GatherHandle | None:
        """A layer's forward begins.

        Returns:
            What was fetched ahead for it; None: nothing that fits.
        """
        if self._task != -1:  # the last backward ended by an error
            self._end_of_backward()
        if layer in self._order:  # it runs again, so a new forward has begun
            self._order, self._last = [], None
        if self._order:
            self._next[self._order[-1]] = layer
        self._order.append(layer)
        self._split_changed = self._keys.get(layer, key) != key
        self._keys[layer] = key
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.layer is not layer or ahead.key != key:
            self._missed.add(ahead.layer)
        else:
            self._missed.discard(layer)
            if ahead.versions == layer.versions():
                return ahead.fetch
        if ahead.fetch is not None:
            ahead.fetch.wait()
        return None

    def go_ahead(self, layer: GatheredLayer, key: GatherKey) -> None:
        """A layer has its weights: begin to gather those of the next."""
        following = self._next.get(layer)
        if following is None:
            return
        guess = following.similar_key(key) if self._split_changed else self._keys[following]
        if guess is None or following.has_kept(guess):
            return
        fetch = None if following in self._missed else following.fetch(guess)
        self._ahead = _Ahead(following, guess, following.versions(), fetch)

    def visit(self, layer: GatheredLayer, key: GatherKey) -> LayerTurn:
        """Note that the backward of this forward is going to gather a layer again."""
        if in_backward():
            return LayerTurn(layer, key, None)
        self._last = LayerTurn(layer, key, self._last)
        return self._last

    def reach(self, visit: LayerTurn) -> None:
        """The backward has come to a layer: begin to gather its weights, if that has not begun, and those before it."""
        self._forget_ahead()
        wanted = [visit] if visit.previous is None else [visit, visit.previous]
        self._keep_only({(v.layer, v.key) for v in wanted})
        for each in wanted:
            self.again(each.layer, each.key)

    def again(self, layer: GatheredLayer, key: GatherKey) -> GatherHandle:
        """Weights in the backward, gathered once until `done` with them."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return layer.fetch(key)
        if (
            self._task == -1
        ):  # another number: a backward within the backward (re-entrant checkpoints)
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if (layer, key) not in self._again:
            self._again[layer, key] = layer.fetch(key)
        return self._again[layer, key]

    def done(self, layer: GatheredLayer, key: GatherKey) -> None:
        """The backward of a layer is over."""
        self._again.pop((layer, key), None)

    @property
    def num_held(self) -> int:
        """Layers whose weights are held here, on the way or there."""
        ahead = self._ahead is not None and self._ahead.fetch is not None
        return len(self._again) + ahead

    def _keep_only(self, wanted: set[tuple[GatheredLayer, GatherKey]]) -> None:
        for item in [item for item in self._again if item not in wanted]:
            self._again.pop(item).wait()

    def _end_of_backward(self) -> None:
        self._keep_only(set())
        self._task = -1

    def _forget_ahead(self) -> None:
        """What no forward took: a layer was left out."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fetch is not None:
            self._missed.add(ahead.layer)
            ahead.fetch.wait()
