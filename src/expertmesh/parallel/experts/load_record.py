"""What all ranks have agreed on of a layer's last call, from which all of them draw the same conclusions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from expertmesh.comm.host_copy import on_host
from expertmesh.costs.communication import RouteShape, TokenLoad
from expertmesh.errors import ConfigError
from expertmesh.parallel.experts.route_split import RouteSplit

FIRST_TOKENS = 4096.0
"""Tokens of a rank that are assumed before any were seen."""


@dataclass(frozen=True)
class Chosen:
    """What one call does.

    Attributes:
        route_degree: ranks that tokens travel over.
        num_parts: that they travel in.
        is_flat: whether they go straight.
        hot: experts whose weights come to the tokens.
        num_pieces: that a part crosses between nodes in.
    """

    route_degree: int
    num_parts: int
    is_flat: bool
    hot: tuple[int, ...]
    num_pieces: int = 1


class _Waiting:
    """A forward whose backward is to come."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen, self.is_over = chosen, False

    def end(self, _: Tensor) -> None:
        self.is_over = True


class Repetitions:
    """What a forward goes like that activation checkpointing repeats: as it went the first time.

    Args:
        layer: name for errors.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        # the graph of a forward holds its entry, which is gone with it where there is no backward
        self._waiting = WeakSet[_Waiting]()
        self._last = Chosen(0, 1, False, ())

    def note(self, chosen: Chosen) -> Callable[[Tensor], None]:
        """A forward begins; gives what is to be told of its result."""
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
        """Of the forward that is repeated now.

        Raises:
            ConfigError: it could be one of several that went different ways.
        """
        # also of those whose backward has begun: the one that is repeated may be among them
        waiting = {call.chosen for call in self._waiting}
        if len(waiting) > 1:
            raise ConfigError(
                f"{self._layer}: {len(self._waiting)} forwards that went different ways wait for their backward, and "
                "activation checkpointing repeats one of them; run each backward before the next forward, or let all go "
                "one way (no --parallel.adaptive, or the same arguments)"
            )
        return next(iter(waiting), self._last)


class LoadRecord:
    """Choices of each expert, over all ranks, in the last call with gradients and in the last without.

    Args:
        num_experts: E.
        num_ranks: over which counts are summed.
    """

    def __init__(self, num_experts: int, *, num_ranks: int) -> None:
        self._num_experts, self._num_ranks = num_experts, num_ranks
        self._seen: dict[bool, Callable[[], list[int]]] = {}
        self._read: dict[bool, tuple[int, ...]] = {}
        self._is_awaited = self._reads = False

    def begin(self, *, is_again: bool) -> None:
        """A call begins; is_again: it is the repetition of one."""
        self._is_awaited = not is_again

    def is_awaited(self, value: Tensor) -> bool:
        """Whether these are the counts of the call that has begun."""
        return (
            self._is_awaited
            and value.shape == (self._num_experts,)
            and not value.is_floating_point()
        )

    def note(self, counts_E: Tensor) -> None:
        """Keep the counts of a call; does not synchronise. If somebody reads them they set out for the host now."""
        mode, self._is_awaited = torch.is_grad_enabled(), False
        self._seen[mode] = on_host(counts_E) if self._reads else counts_E.detach().tolist
        self._read.pop(mode, None)

    def counts(self) -> tuple[int, ...] | None:
        """Of the last call of this mode; None: there was none. On a GPU only the first time waits for what it has to do now."""
        mode, self._reads = torch.is_grad_enabled(), True
        if mode not in self._read and mode in self._seen:
            self._read[mode] = tuple(self._seen[mode]())
        return self._read.get(mode)

    def token_load(self, top_k: int, capacity_factor: float | None = None) -> TokenLoad | None:
        """The same for the cost model; None: nothing was seen, or there was nothing.

        Args:
            top_k: K.
            capacity_factor: of the call, which drops what an expert has above it; None: nothing is dropped.
        """
        counts = self.counts()
        total = 0 if counts is None else sum(counts)
        if counts is None or not total:
            return None
        most = total if capacity_factor is None else capacity_factor * total / len(counts)
        shares = tuple(min(n, most) / total for n in counts)
        return TokenLoad(total / top_k / self._num_ranks, top_k, shares)


def route_shape(split: RouteSplit, nodes: Sequence[int]) -> RouteShape:
    """A split for the cost model, by the first ranks that share tokens and the first that share weights."""
    members, gathering = split.route_cells()[0], split.gather_cells()[0]
    return RouteShape(
        split.route_degree,
        tuple(split.block(rank)[0] for rank in members),
        split.route_e,
        tuple(nodes[rank] for rank in members),
        len(gathering),
        len({nodes[rank] for rank in gathering}) > 1,
    )
