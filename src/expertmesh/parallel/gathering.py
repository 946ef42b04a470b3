"""How shards of experts' weights become what the operators take, and gradients become shards again.

Gathered shards are used where they lie: the slices of an expert's hidden size go to the operators as a list. Their
gradients are added by the operators to one buffer that is ordered by rank, so that it is reduced where it lies, too.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from expertmesh.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from expertmesh.comm.group import RankGroup, wait_for
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.expert_types import WeightGradients
from expertmesh.parallel.offload import HostMemory

SLICED_AXIS = {"w_in": 2, "w_out": 2, "b_in": 2, "b_out": 1}
"""Axis of each parameter that the f slices cut; b_out has no hidden axis, and is cut along D."""


class ShardSource(Protocol):
    """Who owns shards.

    Attributes:
        layer: name for errors and the byte counter.
        names: of the parameters, in the order of their shards.
        replicas: ranks that hold copies of the same shards.
    """

    layer: str
    names: list[str]
    replicas: RankGroup

    def shards(self) -> list[Tensor]:
        """This rank's part of each parameter."""
        ...

    @property
    def host(self) -> HostMemory | None:
        """Where shards rest if not where they are computed with."""
        ...


@dataclass(frozen=True)
class Layout:
    """How the shards of one plan lie together on this rank.

    Attributes:
        group: ranks that share their shards.
        order: slice j of part i is the shard of the group's rank order[j][i].
        offset_f: first slice that this rank computes.
        num_f: slices that there are.
    """

    group: RankGroup
    order: tuple[tuple[int, ...], ...]
    offset_f: int
    num_f: int

    @property
    def ranks(self) -> list[int]:
        """Ranks of the group, slice by slice."""
        return list(chain.from_iterable(self.order))

    @property
    def is_by_rank(self) -> bool:
        """Whether slice after slice is the order of the ranks, so that nothing needs to be copied."""
        return self.ranks == list(range(len(self.ranks)))

    def slices(self, name: str, shards: Tensor) -> tuple[Tensor, ...]:
        """(n, e', ...) shards of one parameter, by rank -> the slices that the operators take, (parts * e', ...) each.

        Views of the shards where neighbours in a slice are neighbours among the ranks, else one copy per slice. b_out
        comes in one piece, with zeros for the columns of other ranks, so that the sum over slices adds each once.
        """
        parts = len(self.order[0])
        found = []
        for members in self.order:
            first = members[0]
            adjacent = members == tuple(range(first, first + parts))
            mine = shards[first : first + parts] if adjacent else shards[list(members)]
            found.append(mine.flatten(0, 1))
        if name != "b_out":
            return tuple(found)
        width = found[0].shape[1]
        before = self.offset_f * width
        after = (self.num_f - self.offset_f - len(found)) * width
        return (pad(torch.cat(found, 1), (before, after)),)

    def by_rank(
        self, name: str, slices: Sequence[Tensor], shard: Tensor, *, is_sum: bool = True
    ) -> Tensor:
        """The inverse of `slices` for gradients, (n, e', ...); a view where nothing must move.

        In a wide type, or in the shard's if they need not be summed over ranks.
        """
        if name == "b_out":
            width = shard.shape[1]
            mine = slices[0].narrow(1, self.offset_f * width, len(self.order) * width)
            slices = mine.split(width, 1)
        wide = accumulate_dtype(shard.dtype) if is_sum else shard.dtype
        if len(slices) == 1 and self.is_by_rank:
            return slices[0].to(wide).reshape(-1, *shard.shape)
        found = slices[0].new_empty(len(self.ranks), *shard.shape, dtype=wide)
        for members, part in zip(self.order, slices, strict=True):
            found[list(members)] = part.to(wide).unflatten(0, (len(members), -1))
        return found


class Fetch:
    """All parameters of a layer on their way to the ranks of one layout, or there."""

    def __init__(self, source: ShardSource, layout: Layout, dtype: torch.dtype) -> None:
        """Launch the collectives; they send the shards as they are now, in this type."""
        self.source, self.layout = source, layout
        where, host = f"{source.layer}, weights", source.host
        with nullcontext() if host is None else host.copying():
            self._started = [
                start_all_gather(
                    shard.to(dtype) if host is None else host.to_device(shard, dtype),
                    layout.group,
                    where=where,
                )
                for shard in source.shards()
            ]
        self._whole: list[tuple[Tensor, ...]] = []

    def wait(self) -> list[tuple[Tensor, ...]]:
        """The slices of every parameter; waits for them the first time."""
        started, self._started = self._started, []
        for (shards, pending), name in zip(started, self.source.names, strict=False):
            wait_for(pending)
            if self.source.host is not None:
                self.source.host.joined(shards)
            self._whole.append(self.layout.slices(name, shards))
        return self._whole


class GradientBuffers:
    """Where the operators add gradients of gathered weights: FP32 (FP64 for FP64), ordered slice by slice.

    They take memory from `open` to `close` only, that is while one layer's backward runs. (And for a moment here,
    because a tensor without memory cannot be made: so they are made once per plan.)

    Args:
        source: of the shards.
        layout: of the weights.
        device: where the experts are computed.
    """

    def __init__(self, source: ShardSource, layout: Layout, device: torch.device) -> None:
        self._flat: dict[str, Tensor] = {}
        self.slices: dict[str, tuple[Tensor, ...]] = {}
        self._layout, self.is_open = layout, False
        n, parts = len(layout.ranks), len(layout.order[0])
        for name, shard in zip(source.names, source.shards(), strict=True):
            wide = accumulate_dtype(shard.dtype)
            if name == "b_out":
                shape = (parts * shard.shape[0], layout.num_f * shard.shape[1])
                flat = torch.empty(shape, dtype=wide, device=device)
                self.slices[name] = (flat,)
            else:
                flat = torch.empty(n, *shard.shape, dtype=wide, device=device)
                self.slices[name] = tuple(part.flatten(0, 1) for part in flat.split(parts))
            self._flat[name] = flat
            flat.untyped_storage().resize_(0)

    def as_main_grads(self) -> WeightGradients:
        """The same for the operators."""
        some = {name: s if len(self._layout.order) > 1 else s[0] for name, s in self.slices.items()}
        b_out = self.slices["b_out"][0] if "b_out" in self.slices else None
        return WeightGradients(some["w_in"], some["w_out"], some.get("b_in"), b_out)

    def open(self, names: Sequence[str]) -> None:
        """Take memory for these parameters' gradients, and set it to zero."""
        for name in () if self.is_open else names:
            flat = self._flat[name]
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
            flat.zero_()
        self.is_open = True

    def close(self) -> None:
        """Give the memory back."""
        for flat in self._flat.values():
            flat.untyped_storage().resize_(0)
        self.is_open = False

    def by_rank(self, name: str, shard: Tensor) -> Tensor:
        """The sum so far of one parameter's gradient, (n, e', ...) in the order of the ranks."""
        if name == "b_out":
            return self._layout.by_rank(name, self.slices[name], shard)
        flat = self._flat[name]
        if self._layout.is_by_rank:
            return flat
        return torch.empty_like(flat).index_copy_(
            0, torch.tensor(self._layout.ranks, device=flat.device), flat
        )


def reduce_gradients(
    source: ShardSource, layout: Layout, whole: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Sum gradients over all ranks, each keeping those of its shards; all of a layer are under way at once.

    Args:
        source: of the shards.
        layout: of the gathered weights.
        whole: (n, e', ...) of every parameter, by rank; None where there is no gradient.

    Returns:
        The gradient of each shard, in the wide type, or None.
    """
    where = f"{source.layer}, weight gradients"
    started = [
        None if grad is None else start_reduce_scatter(grad, layout.group, where=where)
        for grad in whole
    ]
    reduced: list[Tensor | None] = []
    for item in started:
        if item is None:
            reduced.append(None)
            continue
        grad, pending = item
        wait_for(pending)
        grad = grad.contiguous()
        wait_for(start_all_reduce(grad, source.replicas, where=where))
        reduced.append(grad)
    return reduced
