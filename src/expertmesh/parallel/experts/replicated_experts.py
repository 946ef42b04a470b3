"""Replicated hot experts: their weights come to every rank for one call, and their tokens are not sent.

An all-reduce brings the weights: owners contribute their slices, other ranks zeros, so the sum is exact. In the
backward an all-reduce over all ranks (replicas included) sums the gradients in FP32 (FP64 for FP64), and the owners
keep their slices. Both overlap with the all-to-all of other experts' tokens. The weights live until their backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.comm.collectives import start_all_reduce
from expertmesh.comm.group import Pending, RankGroup, wait
from expertmesh.comm.mesh import ExpertDegrees
from expertmesh.moe.dispatch import Dispatched, Experts, apply_experts
from expertmesh.moe.experts import ExpertParameters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.weights import ExpertWeights, WeightGradients
from expertmesh.parallel.experts.tables import on_device

Deposit = Callable[[str, Tensor, Tensor], Tensor | None]
"""Delivers the gradient of a shard (name, gradient, shard); returns the gradient that autograd sees."""


class ReplicatedWeights:
    """Weights of hot experts, under way to all ranks, and their gradients under way back."""

    def __init__(
        self,
        names: Sequence[str],  # names of the parameters
        activation: str,  # activation of the experts
        shards: Sequence[Tensor],  # local shard of each parameter, (E / e, ...)
        hot: Sequence[int],  # ids of the experts, the same on all ranks, not empty
        *,
        degrees: ExpertDegrees,  # how the ranks of one replica hold the experts
        rank: int,  # rank of this process in its replica
        dtype: torch.dtype,  # dtype in which the weights are sent
        copy: RankGroup,  # ranks of this replica
        everyone: RankGroup,  # all ranks
        deposit: Deposit,  # delivers gradients
        bring: Callable[[Tensor], Tensor],  # copies a shard to the compute device
        layer: str,  # name for errors and the byte counter
    ) -> None:
        self.names, self.hot, self.layer = names, tuple(hot), layer
        self._shards, self._degrees, self._everyone = shards, degrees, everyone
        self._deposit, self._dtype, self._activation = deposit, dtype, activation
        part, self._slice = degrees.coordinates(rank)
        first, size = part * shards[0].shape[0], shards[0].shape[0]
        # shape per parameter: (f, h, ...), slice by slice
        self._shapes = [torch.Size((degrees.f, len(hot), *shard.shape[1:])) for shard in shards]
        self._own = [(n, e - first) for n, e in enumerate(self.hot) if first <= e < first + size]
        self._flat = self._pack(bring)
        where = f"{layer}, weights of hot experts"
        self._pending = start_all_reduce(self._flat, copy, where=where)
        self._gradients: Tensor | None = None
        self._bias: Tensor | None = None  # one tensor, although the gradient is stored by slices
        self._returning: Pending | None = None
        self._token: Tensor = _Leave.apply(self, *shards)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _pack(self, bring: Callable[[Tensor], Tensor]) -> Tensor:
        total = sum(shape.numel() for shape in self._shapes)
        device = bring(self._shards[0].detach()[:0]).device
        flat = torch.zeros(total, dtype=self._dtype, device=device)
        for view, shard in zip(self._views(flat), self._shards, strict=True):
            for place, local in self._own:
                view[self._slice, place] = bring(shard.detach()[local])
        return flat

    def parameters(self) -> ExpertParameters:
        """Wait for the weights; returns the parameters of the hot experts, in their order, differentiable."""
        wait(self._pending)
        slices = _arranged(self.names, self._views(self._flat))
        counts = [len(each) for each in slices]
        needs = torch.is_grad_enabled() and any(shard.requires_grad for shard in self._shards)
        found = iter(_Arrive.apply(self._token, self, counts, *(t for s in slices for t in s)))
        seen = {n: tuple(next(found) for _ in s) for n, s in zip(self.names, slices, strict=True)}
        buffers = self._new_buffers() if needs else None
        return ExpertParameters(ExpertWeights.of_names(seen, self._activation), main_grads=buffers)

    def _new_buffers(self) -> WeightGradients:
        """Buffers to which operators add gradients; memory is allocated from `open` to the end of the backward."""
        wide = accumulate_dtype(self._shards[0].dtype)
        self._gradients = torch.empty(self._flat.shape, dtype=wide, device=self._flat.device)
        arranged = _arranged(self.names, self._views(self._gradients))
        found = dict(zip(self.names, arranged, strict=True))
        if "b_out" in found and self._degrees.f > 1:
            self._bias = torch.empty_like(found["b_out"][0])
            found["b_out"] = (self._bias,)
        self._gradients.untyped_storage().resize_(0)
        return WeightGradients.of_names(found)

    def open(self) -> None:
        """Allocate and zero the gradient buffers; they may exist already, after a backward that did not ask for
        them."""
        flat = self._gradients
        if flat is not None:
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
            flat.zero_()
            if self._bias is not None:
                self._bias.zero_()

    def start_back(self, counts: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Start to sum the gradients over ranks; `grads` are those that the operators did not add to the buffers."""
        flat = self._gradients
        assert flat is not None
        if flat.untyped_storage().size() == 0:
            self.open()
        each = iter(grads)
        views = self._views(flat)
        for name, view, count in zip(self.names, views, counts, strict=True):
            given = [next(each) for _ in range(count)]
            if name == "b_out" and self._bias is not None:
                total = self._bias if given[0] is None else self._bias + given[0]
                view += total.unflatten(1, (self._degrees.f, -1)).movedim(1, 0)
                continue
            for j, grad in enumerate(given):
                if grad is not None:
                    view[j].add_(grad)
        where = f"{self.layer}, gradients of hot experts"
        self._returning = start_all_reduce(flat, self._everyone, where=where)

    def finish_back(self) -> list[Tensor | None]:
        """Gradients of this rank's shards; frees the memory of the buffers."""
        wait(self._returning)
        flat = self._gradients
        assert flat is not None
        found: list[Tensor | None] = []
        for name, shard, view in zip(self.names, self._shards, self._views(flat), strict=True):
            if not shard.requires_grad or not self._own:
                found.append(None)
                continue
            grad = torch.zeros(shard.shape, dtype=flat.dtype, device=flat.device)
            for place, local in self._own:
                grad[local] = view[self._slice, place]
            found.append(self._deposit(name, grad, shard))
        flat.untyped_storage().resize_(0)
        return found


def _arranged(names: Sequence[str], views: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """(f, h, ...) of every parameter -> slices for the operators; b_out in one tensor."""
    return [
        (view.movedim(0, 1).flatten(1),) if name == "b_out" else tuple(view.unbind(0))
        for name, view in zip(names, views, strict=True)
    ]


class _Leave(torch.autograd.Function):
    """Autograd node from the shards to a scalar token; its backward runs last, and waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, use: ReplicatedWeights, *shards: Tensor) -> Tensor:
        ctx.use = use
        return shards[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.use.finish_back()


class _Arrive(torch.autograd.Function):
    """Autograd node from the token to the replicated weights; its backward starts to sum their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, use: ReplicatedWeights, counts: list[int], *whole: Tensor) -> Any:
        ctx.use, ctx.counts, ctx.token = use, counts, token.detach()
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.use.start_back(ctx.counts, grads)
        return ctx.token, None, None, *(None for _ in grads)


class LocalTokens:
    """Tokens whose hot experts come to them."""

    def __init__(self, tokens: Dispatched, weights: ReplicatedWeights, num_experts: int) -> None:
        self._tokens, self._weights, self._num_experts = tokens, weights, num_experts

    def finish(self, experts: Experts) -> Tensor:
        """Run the hot experts; returns (T, D), one partial sum per token."""
        parameters, ids_TK = self._weights.parameters(), self._tokens.expert_ids_TK
        hot = self._weights.hot
        places = [hot.index(e) if e in hot else len(hot) for e in range(self._num_experts + 1)]
        places_E = on_device(places, ids_TK.device)
        tokens = Dispatched(
            self._tokens.x_TD,
            places_E[ids_TK.long()],
            self._tokens.weights_TK,
            self._tokens.max_rows,
        )
        y_TD = apply_experts(experts, tokens, parameters)
        if y_TD.requires_grad:
            y_TD.register_hook(lambda _: self._weights.open())
        return y_TD


def without_hot(tokens: Dispatched, hot: Sequence[int], num_experts: int) -> Dispatched:
    """Tokens without their choices of hot experts."""
    ids_TK = tokens.expert_ids_TK
    is_hot_E = on_device([e in hot for e in range(num_experts + 1)], ids_TK.device)
    cold_TK = torch.where(is_hot_E[ids_TK.long()], num_experts, ids_TK)
    return Dispatched(tokens.x_TD, cold_TK, tokens.weights_TK, tokens.max_rows)
