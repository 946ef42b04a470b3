"""Gathered weights as one forward and its backward use them: what autograd sees, keeps, and hands back."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from expertmesh.moe.experts import ExpertParameters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.expert_types import WeightGradients
from expertmesh.parallel.gathering import (
    Fetch,
    GradientBuffers,
    Layout,
    ShardSource,
    reduce_gradients,
)
from expertmesh.parallel.prefetch import FetchedLayer, Key, Prefetcher, Visit


class WeightSource(ShardSource, FetchedLayer, Protocol):
    """Owns shards, and gathers them."""


Whole = list[tuple[Tensor, ...]]
"""The slices of every parameter, in the order of a storage's names."""


class WeightsInUse:
    """The weights of one layer in one forward, under one plan.

    Args:
        source: of the shards.
        layout: of the plan.
        dtype: that they are gathered in.
        key: the plan and the type, which tell gathers of one layer apart.
        prefetcher: gathers them again in the backward where they were dropped.
        buffers: gradient buffers of the layout; several forwards may share them, because backwards run one at a time.
        drops: whether they live until the experts have run only, and are gathered again in the backward.
        main_grads: what the gradients of the shards are added to, in the place of `.grad`; asked in each backward.
    """

    def __init__(
        self,
        source: WeightSource,
        layout: Layout,
        dtype: torch.dtype,
        *,
        key: Key,
        prefetcher: Prefetcher,
        buffers: Callable[[torch.device], GradientBuffers],
        drops: bool,
        main_grads: Callable[[], WeightGradients | None],
    ) -> None:
        self.source, self.layout, self.dtype, self.key = source, layout, dtype, key
        self.drops = drops
        self._prefetcher, self._buffers_for, self._main_grads = prefetcher, buffers, main_grads
        self._first: Fetch | None = None
        self._addresses: dict[int, int] = {}
        self._buffers: GradientBuffers | None = None
        self._wanted: list[bool] = []

    def start(self, fetch: Fetch) -> None:
        """Take what is gathered for the forward, or its repetition in the backward."""
        self._first = fetch

    def wait(self) -> Whole:
        """What was gathered for the forward; not held here any longer."""
        first, self._first = self._first, None
        assert first is not None, "a parameter changed while its layer was dispatching"
        return first.wait()

    def parameters(self, whole: Whole) -> ExpertParameters:
        """Gathered weights as parameters of the experts that this rank computes, differentiable."""
        flat = list(chain.from_iterable(whole))
        shards = self.source.shards()
        self._wanted = [shard.requires_grad for shard in shards]
        direct = self._direct_main_grads()
        if direct is None and self._needs_buffers(shards):
            self._buffers = self._buffers_for(flat[0].device)
        if self.drops:
            self._addresses = {t.untyped_storage().data_ptr(): n for n, t in enumerate(flat)}
            if "b_out" in self.source.names:  # small and padded: it is kept
                del self._addresses[flat[-1].untyped_storage().data_ptr()]
        seen = iter(_Gather.apply(self, flat, [len(slices) for slices in whole], *shards))
        found = {
            name: tuple(next(seen) for _ in slices)
            for name, slices in zip(self.source.names, whole, strict=True)
        }
        one = len(self.layout.order) == 1
        weights = {name: s[0] if one or name == "b_out" else s for name, s in found.items()}
        return ExpertParameters(
            weights["w_in"],
            weights["w_out"],
            weights.get("b_in"),
            found["b_out"][0] if "b_out" in found else None,
            self._dropping if self.drops else nullcontext,
            direct if self._buffers is None else self._buffers.as_main_grads(),
        )

    def _direct_main_grads(self) -> WeightGradients | None:
        """The buffers of the shards themselves, where nothing is gathered, summed over copies, or padded."""
        alone = self._is_alone and self.source.host is None
        whole_bias = "b_out" not in self.source.names or self.layout.num_f == 1
        main = self._main_grads()
        if main is None or not (alone and whole_bias and torch.is_grad_enabled()):
            return None
        return WeightGradients(
            _local(main.w_in), _local(main.w_out), _local(main.b_in), _local(main.b_out)
        )

    def _needs_buffers(self, shards: Sequence[Tensor]) -> bool:
        """Whether the operators had better add gradients to a buffer of ours: to join slices, or to keep FP32 sums."""
        if not torch.is_grad_enabled() or not any(self._wanted):
            return False
        narrow = self.layout.group.size > 1 and self.dtype != accumulate_dtype(shards[0].dtype)
        return len(self.layout.order) > 1 or narrow or self._main_grads() is not None

    def announce_backward(self, y_TD: Tensor) -> None:
        """Prepare for the experts' backward when the gradient of their output comes."""
        if y_TD.requires_grad:
            visit = self._prefetcher.visit(self.source, self.key) if self.drops else None
            y_TD.register_hook(lambda _: self._prepare(visit))

    def _prepare(self, visit: Visit | None) -> None:
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
        main, host = self._main_grads(), self.source.host
        if main is None:
            grad = grad.to(shard.dtype)
        if host is not None:
            grad = host.to_host(grad)
        if main is not None:
            total = _local(getattr(main, name))
            assert total is not None
            total.add_(grad)
            return None
        # a buffer of ours gives its memory back
        return grad.clone() if host is None and self._lies_in_buffer else grad

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank has these weights."""
        return self.layout.group.size == self.source.replicas.size == 1

    @property
    def _lies_in_buffer(self) -> bool:
        return self._buffers is not None and self.layout.group.size == 1


def _local(buffer: Tensor | tuple[Tensor, ...] | None) -> Tensor | None:
    assert buffer is None or isinstance(buffer, DTensor), "main gradients of shards are sharded"
    return None if buffer is None else buffer.to_local()


class _Gather(torch.autograd.Function):
    """Shards in, slices of one plan out."""

    @staticmethod
    def forward(
        ctx: Any, use: WeightsInUse, whole: list[Tensor], counts: list[int], *shards: Tensor
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
