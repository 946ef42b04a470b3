"""How shards of experts' weights become what the operators take, and gradients become shards again.

Gathered shards are used where they lie: the slices of an expert's hidden size go to the operators as a list. Their
gradients are added by the operators to one buffer that is ordered by rank, so that it is reduced where it lies, too.
`storage.py` says what is gathered, `prefetch.py` when.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from expertmesh.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from expertmesh.comm.group import RankGroup, wait
from expertmesh.moe.experts import ExpertParameters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.deferred_wgrad import DeferredWeightGradients
from expertmesh.ops.experts.weights import ExpertWeights, WeightGradients
from expertmesh.parallel.experts.prefetch import (
    GatheredLayer,
    GatheredTensors,
    GatherHandle,
    GatherKey,
    LayerTurn,
    Prefetcher,
    in_backward,
)
from expertmesh.parallel.experts.tables import on_device
from expertmesh.parallel.offload import HostMemory

SLICED_AXIS = {"w_in": 2, "w_out": 2, "b_in": 2, "b_out": 1}
"""Axis of each parameter that the f slices cut; b_out has no hidden axis, and is cut along D."""


class ShardSource(GatheredLayer, Protocol):
    """Who owns shards, and gathers them.

    Attributes:
        layer: name for errors and the byte counter.
        names: of the parameters, in the order of their shards.
        activation: of the experts.
        replicas: ranks that hold copies of the same shards.
    """

    layer: str
    names: list[str]
    activation: str
    replicas: RankGroup

    def shards(self) -> list[Tensor]:
        """This rank's part of each parameter."""

    @property
    def host(self) -> HostMemory | None:
        """Where shards rest if not where they are computed with."""


@dataclass(frozen=True)
class Layout:
    """How the shards of one split lie together on this rank.

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
            if adjacent:
                mine = shards[first : first + parts]
            else:
                mine = shards.index_select(0, on_device(members, shards.device))
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
            part = part.to(wide).unflatten(0, (len(members), -1))
            found.index_copy_(0, on_device(members, found.device), part)
        return found


class Gather:
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
        host = self.source.host
        for (shards, pending), name in zip(started, self.source.names, strict=False):
            # Where copies have a stream of their own, what is sent lies in memory of that one: were it not to wait as well, the
            # next copy could take the memory while it is still being sent.
            with nullcontext() if host is None else host.copying():
                wait(pending)
            if host is not None:
                host.joined(shards)
            self._whole.append(self.layout.slices(name, shards))
        return self._whole


class GradientBuffers:
    """Where the operators add gradients of gathered weights: FP32 (FP64 for FP64), ordered slice by slice.

    They take memory from `open` to `close` only, that is while one layer's backward runs. (And for a moment here,
    because a tensor without memory cannot be made: so they are made once per split.)

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
        return WeightGradients.of_names(self.slices)

    def open(self, names: Sequence[str]) -> None:
        """Take memory for these parameters' gradients, and set it to zero.

        It is there already after a backward that was not asked for weights' gradients (`torch.autograd.grad` of tokens alone).
        """
        for name in names:
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
            0, on_device(self._layout.ranks, flat.device), flat
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
        wait(pending)
        grad = grad.contiguous()
        wait(start_all_reduce(grad, source.replicas, where=where))
        reduced.append(grad)
    return reduced


class GatheredWeights:
    """The weights of one layer in one forward, under one split.

    Args:
        source: of the shards.
        layout: of the split.
        dtype: that they are gathered in.
        key: the split and the type, which tell gathers of one layer apart.
        prefetcher: gathers them again in the backward where they were dropped.
        buffers: gradient buffers of the layout; several forwards may share them, because backwards run one at a time.
        drops: whether they live until the experts have run only, and are gathered again in the backward.
        main_grads: what the gradients of the shards are added to, in the place of `.grad`; asked in each backward.
    """

    def __init__(
        self,
        source: ShardSource,
        layout: Layout,
        dtype: torch.dtype,
        *,
        key: GatherKey,
        prefetcher: Prefetcher,
        buffers: Callable[[torch.device], GradientBuffers],
        drops: bool,
        main_grads: Callable[[], WeightGradients | None],
    ) -> None:
        self.source, self.layout, self.dtype, self.key = source, layout, dtype, key
        self.drops = drops
        self._prefetcher, self._buffers_for, self._main_grads = prefetcher, buffers, main_grads
        self._first: GatherHandle | None = None
        self._addresses: dict[int, int] = {}
        self._buffers: GradientBuffers | None = None
        self._wanted: list[bool] = []
        self._late: DeferredWeightGradients | None = None

    def start(self, fetch: GatherHandle) -> None:
        """Take what is gathered for the forward, or its repetition in the backward."""
        self._first = fetch

    def wait(self) -> GatheredTensors:
        """What was gathered for the forward; not held here any longer."""
        first, self._first = self._first, None
        assert first is not None, "a parameter changed while its layer was dispatching"
        return first.wait()

    def parameters(self, whole: GatheredTensors, *, num_calls: int = 1) -> ExpertParameters:
        """Gathered weights as parameters of the experts that this rank computes, differentiable.

        Args:
            whole: the weights.
            num_calls: of the experts with them, whose gradients are added.
        """
        flat = list(chain.from_iterable(whole))
        shards = self.source.shards()
        self._wanted = [shard.requires_grad for shard in shards]
        direct = self._direct_main_grads()
        if direct is None and self._needs_buffers(shards, num_calls):
            self._buffers = self._buffers_for(flat[0].device)
            if not in_backward():  # still open where the last backward ended by an error
                self._buffers.close()
        if self.drops:
            self._addresses = {t.untyped_storage().data_ptr(): n for n, t in enumerate(flat)}
            if "b_out" in self.source.names:  # small and padded: it is kept
                del self._addresses[flat[-1].untyped_storage().data_ptr()]
        seen = iter(_Gathered.apply(self, flat, [len(slices) for slices in whole], *shards))
        found = {
            name: tuple(next(seen) for _ in slices)
            for name, slices in zip(self.source.names, whole, strict=True)
        }
        context = self._dropping if self.drops else nullcontext
        main = direct if self._buffers is None else self._buffers.as_main_grads()
        weights = ExpertWeights.of_names(found, self.source.activation)
        return ExpertParameters(weights, context, main)

    def late(self, parameters: ExpertParameters) -> ExpertParameters:
        """The same parameters for one call whose weight gradients are computed after the tokens' have set out for home."""
        if not all(self._wanted) or not torch.is_grad_enabled():
            return parameters
        self._late = DeferredWeightGradients()
        return replace(parameters, late=self._late)

    def _direct_main_grads(self) -> WeightGradients | None:
        """The buffers of the shards themselves, where nothing is gathered, summed over copies, or padded."""
        alone = self._is_alone and self.source.host is None
        whole_bias = "b_out" not in self.source.names or self.layout.num_f == 1
        main = self._main_grads()
        if main is None or not (alone and whole_bias and torch.is_grad_enabled()):
            return None
        shards = {name: [_local(g) for g in given] for name, given in main.by_name().items()}
        return WeightGradients.of_names({name: given for name, given in shards.items() if given})

    def _needs_buffers(self, shards: Sequence[Tensor], num_calls: int) -> bool:
        """Whether the operators had better add gradients to a buffer of ours: to join slices, or to keep FP32 sums."""
        if not torch.is_grad_enabled() or not any(self._wanted):
            return False
        summed = self.layout.group.size > 1 or num_calls > 1
        narrow = summed and self.dtype != accumulate_dtype(shards[0].dtype)
        return len(self.layout.order) > 1 or narrow or self._main_grads() is not None

    def announce_backward(self, y_TD: Tensor) -> None:
        """Prepare for the experts' backward when the gradient of their output comes."""
        if y_TD.requires_grad:
            visit = self._prefetcher.visit(self.source, self.key) if self.drops else None
            y_TD.register_hook(lambda _: self._prepare(visit))

    def _prepare(self, visit: LayerTurn | None) -> None:
        if visit is not None:
            self._prefetcher.reach(visit)
        if self._buffers is not None:
            names = zip(self.source.names, self._wanted, strict=True)
            self._buffers.open([name for name, wanted in names if wanted])

    def _dropping(self) -> AbstractContextManager[object]:
        """Autograd keeps a note in the place of each gathered weight, and gathers again when it needs it."""

        def pack(tensor: Tensor) -> Any:
            number = self._addresses.get(tensor.untyped_storage().data_ptr())
            if number is None or tensor.numel() == 0:
                return tensor
            return number, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            number, shape, stride, offset = packed
            again = self._prefetcher.again(self.source, self.key)
            whole = list(chain.from_iterable(again.wait()))
            return whole[number].as_strided(shape, stride, offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def reduce(self, grads: Sequence[Tensor | None], counts: Sequence[int]) -> list[Tensor | None]:
        """Gradients of all slices -> gradients of the shards, summed over all ranks."""
        self._prefetcher.done(self.source, self.key)
        late = [] if self._late is None else self._late.compute()
        if late:
            grads = [_sum_of(*pair) for pair in zip(grads, late, strict=True)]
        each, shards = iter(grads), self.source.shards()
        whole: list[Tensor | None] = []
        for n, (name, shard) in enumerate(zip(self.source.names, shards, strict=True)):
            slices = [next(each) for _ in range(counts[n])]
            whole.append(self._by_rank(name, slices, shard) if self._wanted[n] else None)
        reduced = reduce_gradients(self.source, self.layout, whole)
        found = [
            None if grad is None else self._hand_over(name, grad, shard)
            for name, grad, shard in zip(self.source.names, reduced, shards, strict=True)
        ]
        if self._buffers is not None:
            self._buffers.close()
        return found

    def _by_rank(self, name: str, grads: Sequence[Tensor | None], shard: Tensor) -> Tensor | None:
        given = [grad for grad in grads if grad is not None]
        if self._buffers is not None and self._buffers.is_open:
            for total, grad in zip(self._buffers.slices[name], given, strict=False):
                total.add_(grad)
            return self._buffers.by_rank(name, shard)
        is_sum = not self._is_alone
        return self.layout.by_rank(name, given, shard, is_sum=is_sum) if given else None

    def _hand_over(self, name: str, grad: Tensor, shard: Tensor) -> Tensor | None:
        host = self.source.host
        found = hand_over(name, grad, shard, main=self._main_grads(), host=host)
        # a buffer of ours gives its memory back
        in_buffer = host is None and self._lies_in_buffer
        return found.clone() if found is not None and in_buffer else found

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank has these weights."""
        return self.layout.group.size == self.source.replicas.size == 1

    @property
    def _lies_in_buffer(self) -> bool:
        return self._buffers is not None and self.layout.group.size == 1


def hand_over(
    name: str, grad: Tensor, shard: Tensor, *, main: WeightGradients | None, host: HostMemory | None
) -> Tensor | None:
    """Bring the gradient of a shard to where it rests: what autograd is to see, None if it was added to main gradients."""
    if main is None:
        grad = grad.to(shard.dtype)
    if host is not None:
        grad = host.to_host(grad)
    if main is None:
        return grad
    (total,) = main.by_name()[name]
    _local(total).add_(grad)
    return None


def _local(buffer: Tensor) -> Tensor:
    assert isinstance(buffer, DTensor), "main gradients of shards are sharded"
    local: Tensor = buffer.to_local()
    return local


def _sum_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _Gathered(torch.autograd.Function):
    """Shards in, slices of one split out."""

    @staticmethod
    def forward(
        ctx: Any, use: GatheredWeights, whole: list[Tensor], counts: list[int], *shards: Tensor
    ) -> Any:
        ctx.use, ctx.counts = use, counts
        ctx.set_materialize_grads(False)
        # New tensors: the same gathered one may serve several forwards, each with a gradient of its own.
        slices = [tensor.detach() for tensor in whole]
        wanted = chain.from_iterable(
            [need] * count for need, count in zip(ctx.needs_input_grad[3:], counts, strict=True)
        )
        frozen = [t for t, need in zip(slices, wanted, strict=True) if not need]
        ctx.mark_non_differentiable(*frozen)
        return tuple(slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.use.reduce(grads, ctx.counts)
