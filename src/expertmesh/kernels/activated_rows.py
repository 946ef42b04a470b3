"""Activation of pre-activation rows times their routing weights, and its gradients, in one pass each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.grouped import activate, load_branches, second_branch, second_slope, slope
from expertmesh.kernels.launch import launch, next_power_of_2

_ELEMENTS = 2048
"""Elements of a branch that a program takes at a time."""
_MOST_COLUMNS = 512


@triton.jit
def _load(h_ptr, row, live, n, F, G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load gate and up of BLOCK_N hidden units as FP32; up is the gate, unused, with one branch."""
    if G == 2:
        return load_branches(h_ptr, row, live, n, F, False, BLOCK_N)
    column = n + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (column < F)[None, :]
    gate = tl.load(h_ptr + row[:, None] * F + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return gate, gate


@triton.jit(do_not_specialize=["num_rows"])
def _activated(
    h_ptr,
    s_ptr,
    a_ptr,
    num_rows,
    F,
    G: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a[row, n] = s[row] * act(h[row])[n]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < num_rows
    n = tl.program_id(1) * BLOCK_N
    gate, up = _load(h_ptr, row, live, n, F, G, BLOCK_N)
    value = activate(gate, INNER) * tl.load(s_ptr + row, mask=live, other=0.0)[:, None]
    if G == 2:
        value *= second_branch(up, INNER)
    column = n + tl.arange(0, BLOCK_N)
    places = a_ptr + row[:, None] * F + column[None, :]
    tl.store(places, value.to(a_ptr.dtype.element_ty), mask=live[:, None] & (column < F)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _activated_backward(
    grad_ptr,
    h_ptr,
    s_ptr,
    d_h_ptr,
    d_s_ptr,
    num_rows,
    F,
    G: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gradients of h and s; a program takes whole rows, so that sums have one order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < num_rows
    s = tl.load(s_ptr + row, mask=live, other=0.0)[:, None]
    total = tl.zeros((BLOCK_M,), tl.float32)
    for n in tl.range(0, F, BLOCK_N):
        gate, up = _load(h_ptr, row, live, n, F, G, BLOCK_N)
        column = n + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (column < F)[None, :]
        grad = tl.load(grad_ptr + row[:, None] * F + column[None, :], mask=mask, other=0.0).to(tl.float32)
        act = activate(gate, INNER)
        places = d_h_ptr + row[:, None] * (G * F) + column[None, :]
        if G == 2:
            factor = second_branch(up, INNER)
            total += tl.sum(grad * act * factor, 1)
            d_up = grad * s * act * second_slope(up, INNER)
            tl.store(places + F, d_up.to(d_h_ptr.dtype.element_ty), mask=mask)
            d_gate = grad * s * factor * slope(gate, INNER)
        else:
            total += tl.sum(grad * act, 1)
            d_gate = grad * s * slope(gate, INNER)
        tl.store(places, d_gate.to(d_h_ptr.dtype.element_ty), mask=mask)
    tl.store(d_s_ptr + row, total, mask=live)


def _blocks(F: int) -> dict[str, int]:
    columns = min(_MOST_COLUMNS, max(16, next_power_of_2(F)))
    return {"BLOCK_M": _ELEMENTS // columns, "BLOCK_N": columns}


def forward(h_RH: Tensor, s_R: Tensor, *, num_branches: int, inner: str) -> Tensor:
    """Compute (R, F) in the dtype of h; `s_R` is FP32, both are contiguous."""
    num_rows, F = h_RH.shape[0], h_RH.shape[1] // num_branches
    a_RF, how = h_RH.new_empty(num_rows, F), _blocks(F)
    grid = triton.cdiv(num_rows, how["BLOCK_M"]), triton.cdiv(F, how["BLOCK_N"])
    launch(_activated, grid, h_RH, s_R, a_RF, num_rows, F, G=num_branches, INNER=inner, **how)
    return a_RF


def backward(grad_RF: Tensor, h_RH: Tensor, s_R: Tensor, *, num_branches: int, inner: str) -> tuple[Tensor, Tensor]:
    """Compute the gradients of h, in its dtype, and of s, in FP32; all tensors are contiguous."""
    num_rows, F = grad_RF.shape
    d_h, d_s, how = torch.empty_like(h_RH), torch.empty_like(s_R), _blocks(F)
    grid = (triton.cdiv(num_rows, how["BLOCK_M"]),)
    launch(_activated_backward, grid, grad_RF, h_RH, s_R, d_h, d_s, num_rows, F, G=num_branches, INNER=inner, **how)
    return d_h, d_s
