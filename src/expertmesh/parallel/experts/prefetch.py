"""Prefetch of gathered weights by one layer: the next layer in the forward, the previous layer in the backward.

The order of the layers is taken from the last forward. The split of a layer is guessed: that layer's last one or, if
the previous layer has just changed its split, the same change. Ranks that run the same program guess alike, so they
start the same collectives. A wrong guess wastes one gather; prefetch of that layer then pauses until the guess, though
not acted on, would have been right.

At most one layer is prefetched, so gathered weights of at most two layers exist at a time. If activation checkpointing
repeats a layer's forward in the backward, the repetition and the backward share one gather.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.parallel.experts.route_split import RouteSplit

GatheredTensors = list[tuple[Tensor, ...]]
"""Slices of every parameter, in the order of a storage's names."""

GatherKey = tuple[RouteSplit, torch.dtype]
"""Key that identifies gathers of one layer: split and dtype."""


class GatherHandle(Protocol):
    """Gather of one layer's weights, under way."""

    def wait(self) -> GatheredTensors:
        """Wait for the gathered weights."""


class GatheredLayer(Protocol):
    """Layer whose weights are gathered."""

    def fetch(self, key: GatherKey) -> GatherHandle:
        """Start a gather."""

    def has_kept(self, key: GatherKey) -> bool:
        """Whether kept weights exist and are up to date."""

    def similar_key(self, key: GatherKey) -> GatherKey | None:
        """Key of this layer with another layer's route degree and dtype; None: this layer cannot use that route
        degree."""

    def versions(self) -> Any:
        """Value that changes when the parameters do."""


@dataclass(frozen=True, eq=False)
class LayerTurn:
    """Turn of a layer in a forward, if its backward will gather again."""

    layer: GatheredLayer
    key: GatherKey
    previous: "LayerTurn | None"  # the turn before it in the same forward


@dataclass(frozen=True)
class _Ahead:
    """Guess, and the gather that was started for it; None: not started, because the last guess for this layer was
    wrong."""

    layer: GatheredLayer
    key: GatherKey
    versions: Any
    fetch: GatherHandle | None


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Prefetcher:
    """Prefetches gathers for the layers of one model."""

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
        """Record that a layer's forward begins. Returns the prefetched gather; None: no usable one."""
        if self._task != -1:  # the last backward ended with an error
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
        """Start to gather the weights of the next layer, once a layer has its own."""
        following = self._next.get(layer)
        if following is None:
            return
        guess = following.similar_key(key) if self._split_changed else self._keys[following]
        if guess is None or following.has_kept(guess):
            return
        fetch = None if following in self._missed else following.fetch(guess)
        self._ahead = _Ahead(following, guess, following.versions(), fetch)

    def visit(self, layer: GatheredLayer, key: GatherKey) -> LayerTurn:
        """Record that the backward of this forward will gather a layer again."""
        if in_backward():
            return LayerTurn(layer, key, None)
        self._last = LayerTurn(layer, key, self._last)
        return self._last

    def reach(self, visit: LayerTurn) -> None:
        """Start the gathers of a layer that the backward has reached, and of the layer before it, unless already
        started."""
        self._forget_ahead()
        wanted = [visit] if visit.previous is None else [visit, visit.previous]
        self._keep_only({(v.layer, v.key) for v in wanted})
        for each in wanted:
            self.again(each.layer, each.key)

    def again(self, layer: GatheredLayer, key: GatherKey) -> GatherHandle:
        """Gather of a layer in the backward, shared until `done`."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return layer.fetch(key)
        if self._task == -1:  # another number: a backward within the backward (re-entrant checkpoints)
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if (layer, key) not in self._again:
            self._again[layer, key] = layer.fetch(key)
        return self._again[layer, key]

    def done(self, layer: GatheredLayer, key: GatherKey) -> None:
        """Release the gather of a layer whose backward is over."""
        self._again.pop((layer, key), None)

    @property
    def num_held(self) -> int:
        """Number of layers whose weights are held here or under way."""
        ahead = self._ahead is not None and self._ahead.fetch is not None
        return len(self._again) + ahead

    def _keep_only(self, wanted: set[tuple[GatheredLayer, GatherKey]]) -> None:
        for item in [item for item in self._again if item not in wanted]:
            self._again.pop(item).wait()

    def _end_of_backward(self) -> None:
        self._keep_only(set())
        self._task = -1

    def _forget_ahead(self) -> None:
        """Drop a prefetched gather that no forward used."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fetch is not None:
            self._missed.add(ahead.layer)
            ahead.fetch.wait()
