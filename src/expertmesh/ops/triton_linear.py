"""Triton backend of `grouped_linear`: the experts' kernels on rows that are sorted already."""

from typing import Any

import torch
from torch import Tensor


def forward(
    x_RK: Tensor,
    w: Tensor,
    offsets_E: Tensor,
    b_EN: Tensor | None,
    *,
    transposed: bool,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute (R, N), zeros behind the last live row; rows before the first one are as in `out`. With batch_invariant,
    tiles do not depend on R. Does not synchronise."""
    from expertmesh.kernels import moe_forward, tiles

    x_RK, w = x_RK.contiguous(), w.contiguous()
    N = w.shape[2] if transposed else w.shape[1]
    config = _config(x_RK, w, dim=N, hidden_dim=x_RK.shape[1], batch_invariant=batch_invariant)
    config = tiles.described(config, x_RK, w)
    rows = _rows(x_RK, offsets_E, config.block_m)
    ones = None if b_EN is None else x_RK.new_ones(x_RK.shape[0], 1)
    y = moe_forward.rows_times_weights(
        x_RK,
        w,
        rows,
        config,
        config.input_grad if transposed else config.down,
        transposed=not transposed,
        b_out_ED=None if b_EN is None else b_EN.contiguous(),
        weights_TK=ones,
        out=out,
    )
    dead_R = torch.arange(y.shape[0], device=y.device) >= offsets_E[-1]
    return y.masked_fill_(dead_R[:, None], 0)


def weight_grad(grad_RN: Tensor, x_RK: Tensor, w: Tensor, offsets_E: Tensor, *, transposed: bool) -> Tensor:
    """Compute the gradient of the weights, contiguous; zeros for experts without rows."""
    from expertmesh.kernels import moe_wgrad, tiles

    x_RK, grad_RN = x_RK.contiguous(), grad_RN.contiguous()
    dense, source = (x_RK, grad_RN) if transposed else (grad_RN, x_RK)
    config = _config(x_RK, w, dim=source.shape[1], hidden_dim=dense.shape[1])
    config = tiles.described(config, dense)
    out = torch.empty(w.shape, dtype=x_RK.dtype, device=x_RK.device)
    moe_wgrad.weight_grad(
        dense,
        source,
        _rows(x_RK, offsets_E, None),
        config,
        config.w_in_grad,
        gathered_rows=False,
        out=out,
    )
    return out


def bias_grad(grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the gradient of the biases (E, N)."""
    from expertmesh.kernels import moe_wgrad

    grad_RN = grad_RN.contiguous()
    out = grad_RN.new_empty(offsets_E.shape[0] - 1, grad_RN.shape[1])
    moe_wgrad.bias_grad(grad_RN, _rows(grad_RN, offsets_E, None), out=out, gathered=False)
    return out


def _config(x_RK: Tensor, w: Tensor, *, dim: int, hidden_dim: int, batch_invariant: bool = False) -> Any:
    from expertmesh.kernels import tiles

    return tiles.choose_config(
        x_RK.device,
        x_RK.dtype,
        num_rows=x_RK.shape[0],
        num_experts=w.shape[0],
        dim=dim,
        hidden_dim=hidden_dim,
        num_branches=1,
        batch_invariant=batch_invariant,
    )


def _rows(x_RK: Tensor, offsets_E: Tensor, block_m: int | None) -> Any:
    """Rows in which every row is its own token and slot; cut into tiles if `block_m` is given."""
    from expertmesh.kernels import grouped

    own = torch.arange(x_RK.shape[0], dtype=torch.int32, device=x_RK.device)
    if block_m is None:
        return grouped.Rows.uncut(offsets_E, own, own)
    return grouped.Rows.cut(offsets_E, own, own, block_m)
