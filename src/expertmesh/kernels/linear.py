"""A dense product by the experts' kernel, with tiles that do not depend on the number of rows."""

import torch
from torch import Tensor

from expertmesh.kernels.grouped import Rows
from expertmesh.kernels.moe_forward import rows_times_weights
from expertmesh.kernels.tiles import choose_plan, described


def linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """x W^T + b as one expert whose rows are in order.

    Args:
        x_RK: (R, K), float32, bfloat16 or float16.
        w_NK: (N, K) of the same type.
        b_N: (N,) or None.

    Returns:
        (R, N) in the type of x. Does not synchronise.
    """
    (R, K), N = x_RK.shape, w_NK.shape[0]
    if R == 0:
        return x_RK.new_empty(R, N)
    x_RK, w_NK = x_RK.contiguous(), w_NK.contiguous()
    plan = choose_plan(
        x_RK.device,
        x_RK.dtype,
        num_rows=R,
        num_experts=1,
        dim=N,
        hidden_dim=K,
        num_branches=1,
        batch_invariant=True,
    )
    plan = described(plan, x_RK, w_NK)
    order = torch.arange(R, dtype=torch.int32, device=x_RK.device)
    offsets_E = torch.arange(2, dtype=torch.int32, device=x_RK.device) * R
    ones = None if b_N is None else torch.ones(R, 1, dtype=torch.float32, device=x_RK.device)
    return rows_times_weights(
        x_RK,
        w_NK[None],
        Rows.cut(offsets_E, order, order, plan.block_m),
        plan,
        plan.down,
        transposed=True,
        b_out_ED=None if b_N is None else b_N.contiguous()[None],
        weights_TK=ones,
    )
