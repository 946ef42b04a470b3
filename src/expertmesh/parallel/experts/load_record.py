"""Loads and dispatch options of a layer's last calls, equal on all ranks, from which all ranks decide alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from expertmesh.comm.host_copy import on_host
from expertmesh.costs.communication import RouteShape, TokenLoad
from expertmesh.errors import ConfigError, named
from expertmesh.parallel.experts.route_split import RouteSplit

FIRST_TOKENS = 4096.0
"""Assumed tokens of a rank before the first call."""


@dataclass(frozen=True)
class Chosen:
    """Dispatch options of one call."""

    route_degree: int  # ranks that tokens travel over
    num_parts: int  # parts that the tokens travel in
    is_flat: bool  # whether the all-to-all is flat
    hot: tuple[int, ...]  # experts whose weights come to the tokens
    num_chunks: int = 1  # chunks in which a part crosses nodes


class _Waiting:
    """Forward whose backward is to come."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen, self.is_over = chosen, False

    def end(self, _: Tensor) -> None:
        self.is_over = True


class Repetitions:
    """Options of forwards, so that activation checkpointing repeats a forward with equal options."""

    def __init__(self, layer: str) -> None:
        self._layer = layer
        # the autograd graph of a forward holds its entry, which is freed with the graph if no backward runs
        self._waiting = WeakSet[_Waiting]()
        self._last = Chosen(0, 1, False, ())

    def note(self, chosen: Chosen) -> Callable[[Tensor], None]:
        """Record the options of a new forward; returns a callback for its result."""
        self._waiting = WeakSet(call for call in self._waiting if not call.is_over)
        self._last = chosen
        if not torch.is_grad_enabled():
            return lambda _: None
        call = _Waiting(chosen)
        self._waiting.add(call)

        def over(y_TD: Tensor) -> None:
            if y_TD.requires_grad:
                y_TD.register_hook(call.end)

        return over

    def chosen(self) -> Chosen:
        """Options of the forward that is repeated now."""
        # including those whose backward has begun: the repeated one may be among them
        waiting = {call.chosen for call in self._waiting}
        if len(waiting) > 1:
            raise ConfigError(
                f"{self._layer}: {len(self._waiting)} forwards that went different ways wait for their backward, and "
                "activation checkpointing repeats one of them; run each backward before the next forward, or let all "
                f"go one way (no {named('parallel.adaptive')}, or the same arguments)"
            )
        return next(iter(waiting), self._last)


class LoadRecord:
    """Choices per expert over all ranks, in the last call with gradients and in the last without."""

    def __init__(self, num_experts: int, *, num_ranks: int) -> None:
        self._num_experts, self._num_ranks = num_experts, num_ranks
        self._seen: dict[bool, Callable[[], list[int]]] = {}
        self._read: dict[bool, tuple[int, ...]] = {}
        self._is_awaited = self._reads = False

    def begin(self, *, is_again: bool) -> None:
        """Note that a call begins; is_again: activation checkpointing repeats it."""
        self._is_awaited = not is_again

    def is_awaited(self, value: Tensor) -> bool:
        """Whether a value is the counts of the call that has begun."""
        return self._is_awaited and value.shape == (self._num_experts,) and not value.is_floating_point()

    def note(self, counts_E: Tensor) -> None:
        """Store the counts of a call without synchronizing; once `counts` was called, their copy to the host starts
        here."""
        mode, self._is_awaited = torch.is_grad_enabled(), False
        self._seen[mode] = on_host(counts_E) if self._reads else counts_E.detach().tolist
        self._read.pop(mode, None)

    def counts(self) -> tuple[int, ...] | None:
        """Counts of the last call in this grad mode; None: no call. On a GPU only the first call synchronizes."""
        mode, self._reads = torch.is_grad_enabled(), True
        if mode not in self._read and mode in self._seen:
            self._read[mode] = tuple(self._seen[mode]())
        return self._read.get(mode)

    def token_load(self, top_k: int, capacity_factor: float | None = None) -> TokenLoad | None:
        """Load of the last call for the cost model; None: no call, or no choices.

        Args:
            capacity_factor: capacity factor of the call, which caps each expert's share; None: dropless.
        """
        counts = self.counts()
        total = 0 if counts is None else sum(counts)
        if counts is None or not total:
            return None
        most = total if capacity_factor is None else capacity_factor * total / len(counts)
        shares = tuple(min(n, most) / total for n in counts)
        return TokenLoad(total / top_k / self._num_ranks, top_k, shares)


def route_shape(split: RouteSplit, nodes: Sequence[int]) -> RouteShape:
    """Route shape of a split for the cost model, from its first route cell and its first gather cell."""
    members, gathering = split.route_cells()[0], split.gather_cells()[0]
    return RouteShape(
        split.route_degree,
        tuple(split.block(rank)[0] for rank in members),
        split.route_e,
        tuple(nodes[rank] for rank in members),
        len(gathering),
        len({nodes[rank] for rank in gathering}) > 1,
    )
