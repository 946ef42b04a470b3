"""Deferred weight gradients: a backward of `moe_mlp` that returns the tokens' gradients at once, and weight gradients
on request.

The weight gradients are then computed while the tokens' gradients are exchanged between ranks (zero-bubble schedules do
the same between pipeline stages: Qi et al., arXiv 2401.10241).
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import NUM_LISTS, ExpertsCall, make_experts_call
from expertmesh.ops.experts.weights import HiddenGradients


class DeferredWeightGradients:
    """Weight gradients of one call, computed on request. All parameters must require gradients."""

    def __init__(self) -> None:
        self._left: tuple[ExpertsCall, Tensor, tuple[HiddenGradients, ...]] | None = None
        self._main: Sequence[Tensor] = ()

    def run(self, call: ExpertsCall, main: Sequence[Tensor], *, save_h: bool) -> Tensor:
        """Compute the output (T, D) as `operator.run` does, except that autograd does not see the weight gradients."""
        self._main = main
        y_TD: Tensor = _DeferredExperts.apply(self, call, save_h, *call.differentiable)
        return y_TD

    def leave(self, call: ExpertsCall, grad_TD: Tensor, kept: tuple[HiddenGradients, ...]) -> None:
        """Store the inputs of `compute`."""
        self._left = call, grad_TD, kept

    def compute(self) -> list[Tensor | None]:
        """Compute gradients in the order of `ExpertWeights.parameters`; all None if they were added to main gradients.

        Returns [] if no backward has run.
        """
        if self._left is None:
            return []
        (call, grad_TD, kept), self._left = self._left, None
        with torch.no_grad(), without_autocast(grad_TD.device):
            half = BACKENDS[call.backend].weight_grads
            assert half is not None
            found = half(call, grad_TD, kept, self._main)
        return [None] * len(found) if self._main else found


class _DeferredExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, late: DeferredWeightGradients, call: ExpertsCall, save_h: bool, *tensors: Tensor) -> Tensor:
        with without_autocast(call.x_TD.device):
            y_TD, hidden = BACKENDS[call.backend].forward(call, save_h=save_h)
        x, weights, *lists = call.flat()[: 2 + NUM_LISTS]
        ctx.late, ctx.words = late, call.flat()[2 + NUM_LISTS :]
        ctx.lengths = [len(several) for several in lists]
        ctx.save_for_backward(x, weights, *chain(*lists), *hidden)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        x, weights = next(saved), next(saved)
        lists = [list(islice(saved, length)) for length in ctx.lengths]
        fields: list[Any] = [x, weights, *lists, *ctx.words]
        call = make_experts_call(*fields)
        grad_TD = grad_TD.contiguous()
        half = BACKENDS[call.backend].data_grads
        assert half is not None
        with without_autocast(grad_TD.device):
            d_x, d_weights, kept = half(call, grad_TD, list(saved))
        ctx.late.leave(call, grad_TD, kept)
        return None, None, None, d_x, d_weights, *[None] * len(call.experts.parameters)
