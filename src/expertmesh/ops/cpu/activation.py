"""The element-wise half of the experts on the CPU: activation and its gradient.

A block of rows goes through all passes before the next one starts, so that what one pass writes is in the cache for the
next; many rows take a compiled loop instead (`compiled_passes`). Arithmetic is FP32 (FP64 for FP64) whatever the type of
the rows, with one rounding at the end. `docs/log.md` has what was tried.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name, num_branches, pointwise, pointwise_backward
from expertmesh.ops.cpu import compiled_passes

BLOCK_ELEMENTS = 262144
"""Elements of one branch per block and thread: 1 MiB in FP32."""


def forward(activation: str, h_RH: Tensor, s_R: Tensor, out_RF: Tensor, *, num_rows: int) -> None:
    """Write s * act(h).

    Args:
        activation: its name.
        h_RH: (R, G * F) pre-activations.
        s_R: (R,) routing weights, FP32 or FP64.
        out_RF: (R, F), of h's type.
        num_rows: rows of the whole call, of which these are some; many are worth a compiled loop.
    """
    if compiled_passes.serves(activation, out_RF, num_rows=num_rows, backward=False):
        compiled_passes.forward_loop(activation, h_RH.dtype)(h_RH, s_R, out_RF)
        return
    for h, s, out in _blocks(out_RF.shape[1], h_RH, s_R[:, None], out_RF):
        gate, *up = h.to(s.dtype).chunk(num_branches(activation), 1)
        act = pointwise(gate, inner_name(activation))
        for branch in up:
            act.mul_(branch)
        torch.mul(act, s, out=out)


def backward(
    activation: str,
    grad_PF: Tensor,
    h_RH: Tensor,
    rows_P: Tensor | None,
    s_P: Tensor,
    out_PF: Tensor,
    d_h_PH: Tensor,
    *,
    num_rows: int,
) -> Tensor:
    """Write s * act(h) and the gradient of h, for places whose rows lie anywhere in h.

    Args:
        activation: its name.
        grad_PF: (P, F) gradient of s * act(h) before the product with s, that is dO W_out; may be overwritten.
        h_RH: (R, G * F) pre-activations, of the same type.
        rows_P: (P,) int32 in [0, R); None: all rows in order.
        s_P: (P,) routing weights, FP32 or FP64.
        out_PF: (P, F), receives s * act(h).
        d_h_PH: (P, G * F), receives the gradient of h.
        num_rows: rows of the whole call, as in `forward`.

    Returns:
        The gradient of s, rowsum(grad * act(h)), (P,).
    """
    inner, branches, F = inner_name(activation), num_branches(activation), out_PF.shape[1]
    if compiled_passes.serves(activation, out_PF, num_rows=num_rows, backward=True):
        if rows_P is None:
            rows_P = torch.arange(len(h_RH), dtype=torch.int32, device=h_RH.device)
        loop = compiled_passes.backward_loop(activation, h_RH.dtype)
        d_s: Tensor = loop(grad_PF, h_RH, rows_P, s_P, out_PF, *d_h_PH.split(F, 1))
        return d_s
    # every block reads what it needs of H before it writes there, so it may lie in dH's place
    h_PH = h_RH if rows_P is None else torch.index_select(h_RH, 0, rows_P, out=d_h_PH)
    d_s_P = torch.empty_like(s_P)
    columns = (grad_PF, h_PH, s_P[:, None], d_s_P, out_PF, d_h_PH)
    for grad, h, s, d_s, out, d_h in _blocks(F, *columns):
        gate, *up = h.to(s.dtype).chunk(branches, 1)
        d_gate, *d_up = d_h.chunk(branches, 1)
        grad, act = grad.to(s.dtype), pointwise(gate, inner)
        whole = act * up[0] if up else act
        torch.sum(grad * whole, 1, out=d_s)
        torch.mul(whole, s, out=out)
        grad.mul_(s)
        if up:
            grad, down = grad * up[0], grad
            torch.mul(down, act, out=d_up[0])
        d_gate.copy_(pointwise_backward(grad, gate, inner))
    return d_s_P


def _blocks(hidden_dim: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // max(hidden_dim, 1))
    return zip(*(column.split(size) for column in columns), strict=True)
