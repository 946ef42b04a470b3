"""Blockwise computation of an experts class's own gate on many rows, in cache-sized blocks, with recomputation in the
backward.

Rows are independent in such gates: transformers computes them for one expert's rows or for all rows, depending on the
implementation. The class's own code is run unchanged; its intermediate results are not kept.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.plain_call import is_plain

Gate = Callable[[Tensor], Tensor]

SMALLEST = 1 << 20
"""Number of elements of the rows from which blockwise computation pays off."""
BLOCK_ELEMENTS = 1 << 18
"""Number of elements of a block of rows per thread; a gate creates several intermediates of half this size."""


def weighted_gate(gate: Gate, h_RH: Tensor, s_R: Tensor) -> Tensor:
    """Compute s * gate(h), rounding the product once.

    Args:
        gate: maps rows (R, H) to rows (R, F), each independent of the others.
        h_RH: (R, H) pre-activations.
        s_R: (R,) weights of any floating-point dtype.

    Returns:
        (R, F) in the dtype of the gate's result.
    """
    serves = (
        h_RH.numel() >= SMALLEST
        and h_RH.dtype.itemsize >= 4  # rows in 16-bit dtypes gain nothing
        and is_plain(h_RH, s_R)
        and autocast_dtype(h_RH.device) is None
        and _has_no_parameters(gate, h_RH)
    )
    if not serves:
        return _weighted(gate, h_RH, s_R)
    a_RF: Tensor = _BlockwiseGate.apply(h_RH, s_R, gate)
    return a_RF


def _weighted(gate: Gate, h_RH: Tensor, s_R: Tensor) -> Tensor:
    a_RF = gate(h_RH)
    return (a_RF * s_R[:, None]).to(a_RF.dtype)


def _has_no_parameters(gate: Gate, h_RH: Tensor) -> bool:
    """Whether the gate has no inputs with gradients except its row; tested on a row of zeros."""
    with torch.enable_grad():
        row = h_RH.new_zeros(1, h_RH.shape[1]).requires_grad_()
        open_nodes = [gate(row).grad_fn]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", row) is not row:
            return False
        open_nodes.extend(following for following, _ in node.next_functions)
    return True


def _blocks(h_RH: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // h_RH.shape[1])
    for start in range(0, len(h_RH), rows):
        yield slice(start, min(start + rows, len(h_RH)))


class _BlockwiseGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RH: Tensor, s_R: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(h_RH, s_R)
        ctx.gate = gate
        first, *others = _blocks(h_RH)
        a = _weighted(gate, h_RH[first], s_R[first])
        a_RF = a.new_empty(len(h_RH), a.shape[1])
        a_RF[first] = a
        for rows in others:
            a_RF[rows] = _weighted(gate, h_RH[rows], s_R[rows])
        return a_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        h_RH, s_R = ctx.saved_tensors
        d_h, d_s = torch.empty_like(h_RH), torch.empty_like(s_R)
        for rows in _blocks(h_RH):
            h, s = (t[rows].detach().requires_grad_() for t in (h_RH, s_R))
            with torch.enable_grad():
                a = _weighted(ctx.gate, h, s)
            d_h[rows], d_s[rows] = torch.autograd.grad(a, (h, s), grad_RF[rows])
        return d_h, d_s, None
