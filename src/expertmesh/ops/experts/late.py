"""`moe_mlp` whose backward gives the tokens' gradients at once and those of the weights when somebody asks.

What only weight gradients need then fills a time of waiting: here for the exchange that takes the tokens' gradients home
(zero-bubble schedules do the same between pipeline stages: Qi et al., arXiv 2401.10241).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.expert_types import HiddenGradients
from expertmesh.ops.experts.call import ExpertsCall


class LateWeightGradients:
    """The weight gradients of one call, left to be computed. All parameters must want a gradient."""

    def __init__(self) -> None:
        self._left: tuple[ExpertsCall, Tensor, tuple[HiddenGradients, ...]] | None = None
        self._main: Sequence[Tensor] = ()

    def run(self, call: ExpertsCall, main: Sequence[Tensor], *, save_h: bool) -> Tensor:
        """The output (T, D); as `operator.run`, but for the weights' gradients, which autograd does not see."""
        self._main = main
        y_TD: Tensor = _LateExperts.apply(self, call, save_h, *call.differentiable)
        return y_TD

    def leave(self, call: ExpertsCall, grad_TD: Tensor, kept: tuple[HiddenGradients, ...]) -> None:
        """Keep what `compute` needs."""
        self._left = call, grad_TD, kept

    def compute(self) -> list[Tensor | None]:
        """The gradients in the order of `ExpertsCall.parameters`, or none of them where they were added to buffers.

        Nothing where no backward left any.
        """
        if self._left is None:
            return []
        (call, grad_TD, kept), self._left = self._left, None
        with torch.no_grad(), without_autocast(grad_TD.device):
            found = call.weight_grads(grad_TD, kept, self._main)
        return [None] * len(found) if self._main else found


class _LateExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, late: LateWeightGradients, call: ExpertsCall, save_h: bool, *tensors: Tensor
    ) -> Tensor:
        with without_autocast(call.x_TD.device):
            y_TD, hidden = call.forward(save_h=save_h)
        ctx.late, ctx.lengths = late, [len(call.w_in), len(call.w_out), len(call.b_in)]
        ctx.kind = call.activation, call.backend
        ctx.num_maps = len(call.maps)
        ctx.save_for_backward(*tensors, *call.maps, *hidden)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        x, weights, *rest = ctx.saved_tensors
        ends = [sum(ctx.lengths[:i]) for i in range(4)]
        w_in, w_out, b_in = (list(rest[a:b]) for a, b in zip(ends, ends[1:], strict=False))
        num_parameters = len(ctx.needs_input_grad) - 5
        b_out, after = list(rest[ends[3] : num_parameters]), rest[num_parameters:]
        maps, hidden = list(after[: ctx.num_maps]), after[ctx.num_maps :]
        call = ExpertsCall(x, weights, w_in, w_out, b_in, b_out, maps, *ctx.kind)
        grad_TD = grad_TD.contiguous()
        with without_autocast(grad_TD.device):
            d_x, d_weights, kept = call.data_grads(grad_TD, hidden)
        ctx.late.leave(call, grad_TD, kept)
        return None, None, None, d_x, d_weights, *[None] * num_parameters
