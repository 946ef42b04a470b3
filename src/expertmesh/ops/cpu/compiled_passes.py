"""Activation of many rows and its gradient on a CPU, each as one compiled loop that reads and writes every number once.

The loop replaces up to fifteen PyTorch operators per block of `activation_passes`, and gathers H too. The arithmetic is
the same, FP32 rounded once at the end; only exponentials may differ in their last bit, and sums in order.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from expertmesh.ops.activation import (
    inner_name,
    num_branches,
    pointwise,
    pointwise_backward,
    second_branch,
    second_branch_backward,
)
from expertmesh.ops.cpu.compiled_loops import DTYPES, Loop, example_values, make_loop

SMALLEST = 1 << 21
"""Fewest elements N F of A for which loops are compiled."""


def serves(activation: str, rows_RF: Tensor, *, num_rows: int, backward: bool) -> bool:
    """Whether `CompiledPasses` supports this pass. The first large call of an activation and dtype compiles its loop.

    Args:
        rows_RF: some rows of A; H and the gradients have its dtype.
        num_rows: N, rows of the whole call.
    """
    F, dtype = rows_RF.shape[1], rows_RF.dtype
    if num_rows * F < SMALLEST or F < 2 or dtype not in DTYPES or not rows_RF.is_cpu:
        return False
    return (backward_loop if backward else forward_loop)(activation, dtype).run is not None


@dataclass(frozen=True)
class CompiledPasses:
    """Compiled replacement of `Passes`, for calls that `serves` accepts."""

    activation: str  # the name of the activation

    def forward(self, h_RH: Tensor, s_R: Tensor, out_RF: Tensor) -> None:
        """Write s * act(h), see `Passes.forward`."""
        forward_loop(self.activation, h_RH.dtype)(h_RH, s_R, out_RF[: h_RH.shape[0]])

    def backward(
        self,
        grad_WF: Tensor,
        h_RH: Tensor,
        rows_W: Tensor | None,
        s_W: Tensor,
        out_WF: Tensor,
        d_h_WH: Tensor,
    ) -> Tensor:
        """Write s * act(h) and the gradient of h, see `Passes.backward`; but d_h may not share memory with h, and grad
        is not overwritten."""
        if rows_W is None:
            rows_W = torch.arange(len(h_RH), dtype=torch.int32, device=h_RH.device)
        return backward_loop(self.activation, h_RH.dtype)(
            grad_WF, h_RH, rows_W, s_W, out_WF, *d_h_WH.split(out_WF.shape[1], 1)
        )


@cache
def forward_loop(activation: str, dtype: torch.dtype) -> Loop:
    """Compile the loop of the forward."""
    hidden = num_branches(activation) * 80
    example = (
        example_values(7, hidden, dtype=dtype),
        example_values(7),
        torch.zeros(7, 80, dtype=dtype, device="cpu"),
    )
    return make_loop(partial(_forward, activation), example)


@cache
def backward_loop(activation: str, dtype: torch.dtype) -> Loop:
    """Compile the loop of the backward."""
    hidden = num_branches(activation) * 80
    grad_WF, h_RH = example_values(5, 80, dtype=dtype), example_values(7, hidden, dtype=dtype)
    rows_W = torch.tensor([6, 0, 2, 2, 1], dtype=torch.int32, device="cpu")
    out_WF, d_h_WH = (torch.zeros(5, n, dtype=dtype, device="cpu") for n in (80, hidden))
    return make_loop(
        partial(_backward, activation),
        (grad_WF, h_RH, rows_W, example_values(5), out_WF, *d_h_WH.split(80, 1)),
    )


def _forward(activation: str, h_RH: Tensor, s_R: Tensor, out_RF: Tensor) -> Tensor:
    inner = inner_name(activation)
    gate, *up = h_RH.float().split(out_RF.shape[1], 1)
    act = _pointwise(gate, inner)
    out = act * second_branch(up[0], inner) if up else act
    out_RF.copy_(out * s_R[:, None])
    return s_R.new_zeros(2)  # a compiled function has to return something


def _backward(
    activation: str,
    grad_WF: Tensor,
    h_RH: Tensor,
    rows_W: Tensor,
    s_W: Tensor,
    out_WF: Tensor,
    *d_branches: Tensor,
) -> Tensor:
    inner = inner_name(activation)
    gate, *up = h_RH[rows_W].float().split(out_WF.shape[1], 1)
    d_gate, *d_up = d_branches
    grad, act, s_W1 = grad_WF.float(), _pointwise(gate, inner), s_W[:, None]
    out = act * second_branch(up[0], inner) if up else act
    d_s_W = (grad * out).sum(1)
    out_WF.copy_(out * s_W1)
    grad = grad * s_W1
    if up:
        d_up[0].copy_(second_branch_backward(grad * act, up[0], inner))
        grad = grad * second_branch(up[0], inner)
    d_gate.copy_(_pointwise_backward(grad, gate, inner))
    return d_s_W


def _pointwise(h: Tensor, inner: str) -> Tensor:
    return h * _normal_cdf(h)[0] if inner == "gelu" else pointwise(h, inner)


def _pointwise_backward(grad: Tensor, h: Tensor, inner: str) -> Tensor:
    if inner != "gelu":
        return pointwise_backward(grad, h, inner)
    cdf, exponential = _normal_cdf(h)
    return grad * (cdf + h * exponential / math.sqrt(2 * math.pi))


def _normal_cdf(h: Tensor) -> tuple[Tensor, Tensor]:
    """Phi(h) of the normal distribution and exp(-h^2 / 2), which share one exponential.

    Formula: Abramowitz and Stegun 7.1.26, as in PyTorch's vectorised error function; |error| <= 1.5e-7.
    """
    exponential = torch.exp(h * h * -0.5)
    t = 1 / (1 + (0.3275911 * math.sqrt(0.5)) * h.abs())
    series = torch.zeros_like(h)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + coefficient) * t
    tail = 0.5 * series * exponential
    return torch.where(h >= 0, 1 - tail, tail), exponential
