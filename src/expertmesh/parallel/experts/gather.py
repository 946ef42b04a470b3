"""Gather of expert weights from shards, and reduce-scatter of their gradients to shards.

Gathered shards are used in place: operators take the slices of an expert's hidden size as a list. Operators add
gradients to one buffer in rank order, so it is reduced in place as well. `storage.py` decides which weights are
gathered, `prefetch.py` when.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.offload import HostMemory

SLICED_AXIS = {"w_in": 2, "w_out": 2, "b_in": 2, "b_out": 1}
"""Axis of each parameter that the f slices cut; b_out has no hidden axis, and is cut along D."""


class ShardSource(GatheredLayer, Protocol):
    """Owner of shards that can be gathered."""

    layer: str  # name for errors and the byte counter
    names: list[str]  # names of the parameters, in the order of their shards
    activation: str  # activation of the experts
    replicas: RankGroup  # ranks that hold the same shards

    def shards(self) -> list[Tensor]:
        """Local shard of each parameter."""

    @property
    def host(self) -> HostMemory | None:
        """Host memory in which shards rest; None: they rest on the compute device."""


@dataclass(frozen=True)
class Layout:
    """Layout of the gathered shards of one split on this rank."""

    group: RankGroup  # ranks that share their shards
    order: tuple[tuple[int, ...], ...]  # slice j of part i is the shard of the group's rank order[j][i]
    offset_f: int  # first slice that this rank computes
    num_f: int  # total number of slices

    @property
    def ranks(self) -> list[int]:
        """Ranks of the group, slice by slice."""
        return list(chain.from_iterable(self.order))

    @property
    def is_by_rank(self) -> bool:
        """Whether the order slice by slice equals the rank order, so that no copy is needed."""
        return self.ranks == list(range(len(self.ranks)))

    def slices(self, name: str, shards: Tensor) -> tuple[Tensor, ...]:
        """(n, e', ...) shards of one parameter, by rank -> slices for the operators, (parts * e', ...) each.

        Slices are views where the ranks of a slice are neighbours, else one copy per slice. b_out is one tensor, with
        zeros in the columns of other ranks, so that the sum over slices adds each column once.
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

    def by_rank(self, name: str, slices: Sequence[Tensor], shard: Tensor, *, is_sum: bool = True) -> Tensor:
        """Inverse of `slices` for gradients, (n, e', ...); a view where possible.

        In the accumulation dtype, or in the shard's if the gradients are not summed over ranks.
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
    """Gather of all parameters of a layer to the ranks of one layout."""

    def __init__(self, source: ShardSource, layout: Layout, dtype: torch.dtype) -> None:
        """Launch the collectives, which send the shards as they are now, in `dtype`."""
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
        """Slices of every parameter; the first call waits for the collectives."""
        started, self._started = self._started, []
        host = self.source.host
        for (shards, pending), name in zip(started, self.source.names, strict=False):
            # The sent copy lies in memory of the copy stream. That stream must wait as well: otherwise its next copy
            # could reuse the memory during the send.
            with nullcontext() if host is None else host.copying():
                wait(pending)
            if host is not None:
                host.joined(shards)
            self._whole.append(self.layout.slices(name, shards))
        return self._whole


class GradientBuffers:
    """Buffers to which operators add gradients of gathered weights: FP32 (FP64 for FP64), ordered slice by slice.

    Memory is allocated from `open` to `close` only, while one layer's backward runs. The constructor allocates it for a
    moment, because a tensor cannot be created without memory; therefore buffers are created once per split.
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
        """Buffers in the form that the operators take."""
        return WeightGradients.of_names(self.slices)

    def open(self, names: Sequence[str]) -> None:
        """Allocate and zero the gradients of these parameters.

        Memory may exist already, after a backward that did not ask for weight gradients (`torch.autograd.grad` of
        tokens alone).
        """
        for name in names:
            flat = self._flat[name]
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
            flat.zero_()
        self.is_open = True

    def close(self) -> None:
        """Free the memory."""
        for flat in self._flat.values():
            flat.untyped_storage().resize_(0)
        self.is_open = False

    def by_rank(self, name: str, shard: Tensor) -> Tensor:
        """Accumulated gradient of one parameter, (n, e', ...) in rank order."""
        if name == "b_out":
            return self._layout.by_rank(name, self.slices[name], shard)
        flat = self._flat[name]
        if self._layout.is_by_rank:
            return flat
        return torch.empty_like(flat).index_copy_(0, on_device(self._layout.ranks, flat.device), flat)


def reduce_gradients(source: ShardSource, layout: Layout, whole: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Reduce-scatter gradients to their shards, and sum them over replicas; all parameters of a layer are reduced
    concurrently.

    Args:
        whole: (n, e', ...) gradient of every parameter, by rank; None: no gradient.

    Returns:
        The gradient of each shard, in the accumulation dtype, or None.
    """
    where = f"{source.layer}, weight gradients"
    started = [None if grad is None else start_reduce_scatter(grad, layout.group, where=where) for grad in whole]
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
    """Gathered weights of one layer in one forward, under one split.

    Args:
        buffers: factory of the layout's gradient buffers; several forwards may share them, because backwards run one at
            a time.
        main_grads: returns the main gradients that shards' gradients are added to instead of `.grad`; called in each
            backward.
    """

    def __init__(
        self,
        source: ShardSource,  # owner of the shards
        layout: Layout,  # layout of the split
        dtype: torch.dtype,
        *,
        key: GatherKey,  # split and dtype, which identify gathers of a layer
        prefetcher: Prefetcher,  # gathers dropped weights again in the backward
        buffers: Callable[[torch.device], GradientBuffers],
        drops: bool,  # whether weights are freed after the forward, and gathered again in the backward
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
        """Set the gather of the forward, or of its repetition in the backward."""
        self._first = fetch

    def wait(self) -> GatheredTensors:
        """Weights gathered for the forward; this object keeps no reference to them."""
        first, self._first = self._first, None
        assert first is not None, "a parameter changed while its layer was dispatching"
        return first.wait()

    def parameters(self, whole: GatheredTensors, *, num_calls: int = 1) -> ExpertParameters:
        """Parameters of the experts that this rank computes, from gathered weights; differentiable."""
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
        found = {name: tuple(next(seen) for _ in slices) for name, slices in zip(self.source.names, whole, strict=True)}
        context = self._dropping if self.drops else nullcontext
        main = direct if self._buffers is None else self._buffers.as_main_grads()
        weights = ExpertWeights.of_names(found, self.source.activation)
        return ExpertParameters(weights, context, main)

    def late(self, parameters: ExpertParameters) -> ExpertParameters:
        """Parameters for one call whose weight gradients are computed after the tokens' gradients are sent."""
        if not all(self._wanted) or not torch.is_grad_enabled():
            return parameters
        self._late = DeferredWeightGradients()
        return replace(parameters, late=self._late)

    def _direct_main_grads(self) -> WeightGradients | None:
        """Main gradients of the shards, if nothing is gathered, summed over replicas, or padded; else None."""
        alone = self._is_alone and self.source.host is None
        whole_bias = "b_out" not in self.source.names or self.layout.num_f == 1
        main = self._main_grads()
        if main is None or not (alone and whole_bias and torch.is_grad_enabled()):
            return None
        shards = {name: [own_part(g) for g in given] for name, given in main.by_name().items()}
        return WeightGradients.of_names({name: given for name, given in shards.items() if given})

    def _needs_buffers(self, shards: Sequence[Tensor], num_calls: int) -> bool:
        """Whether operators must add gradients to `GradientBuffers`: to join slices, to keep FP32 sums, or for main
        gradients."""
        if not torch.is_grad_enabled() or not any(self._wanted):
            return False
        summed = self.layout.group.size > 1 or num_calls > 1
        narrow = summed and self.dtype != accumulate_dtype(shards[0].dtype)
        return len(self.layout.order) > 1 or narrow or self._main_grads() is not None

    def announce_backward(self, y_TD: Tensor) -> None:
        """Register a hook on the experts' output that prepares for their backward."""
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
        """Context in which autograd saves a reference instead of each gathered weight, and gathers again on use."""

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
            result: Tensor = whole[number].as_strided(shape, stride, offset)
            return result

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
        # the buffer frees its memory, so the gradient is copied
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
    """Move the gradient of a shard to its memory; returns the gradient for autograd, None if it was added to main
    gradients."""
    if main is None:
        grad = grad.to(shard.dtype)
    if host is not None:
        grad = host.to_host(grad)
    if main is None:
        return grad
    (total,) = main.by_name()[name]
    own_part(total).add_(grad)
    return None


def _sum_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


class _Gathered(torch.autograd.Function):
    """Shards in, slices of one split out."""

    @staticmethod
    def forward(ctx: Any, use: GatheredWeights, whole: list[Tensor], counts: list[int], *shards: Tensor) -> Any:
        ctx.use, ctx.counts = use, counts
        ctx.set_materialize_grads(False)
        # New tensors: one gathered tensor may serve several forwards, each with its own gradient.
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
