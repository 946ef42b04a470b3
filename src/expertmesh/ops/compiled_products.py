"""Few rows times the weights of many experts on a CPU, as fast as memory gives the weights.

A BLAS library packs a weight before it multiplies it, which pays from some ten rows on; with fewer, reading the weight is
all there is to do, and packing takes as long again. A loop of our own reads a weight once for up to four rows
(docs/log.md has the times). It is for weights that no cache of the processor holds.
"""

from functools import cache

import torch
from torch import Tensor

from expertmesh.ops.compiled import DTYPES, Loop, example_values, make_loop

ROWS = 4
"""Of a block: their sums stay in registers, and the loop is still as fast as reading."""
SMALLEST = 1 << 24
"""Elements of all weights from which a loop is made: 32 MiB in BF16."""


def serves(*weights: Tensor) -> bool:
    """Whether `product` may be called with these (E, N, K); the first large ones of a type have its loop made."""
    if sum(w.numel() for w in weights) < SMALLEST:
        return False
    return all(
        w.dtype in DTYPES
        and min(w.shape) > 1
        and w.is_contiguous()
        and loop_for(w.dtype).run is not None
        for w in weights
    )


def product(x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_B4: Tensor) -> Tensor:
    """Multiply blocks of rows by their experts' weights, transposed; with FP32 sums, and not seen by autograd.

    A row's sums are made in the same order whatever else is in the call.

    Args:
        x_RK: (R, K) FP32, contiguous, R at least 2.
        w_ENK: (E, N, K) for which `serves` holds.
        experts_B: (B,) int32 in [0, E), not checked; B at least 2.
        rows_B4: (B, 4) int32 in [0, R), not checked: which rows of x; a block of fewer names one of them again.

    Returns:
        (B, 4, N) FP32.
    """
    run = loop_for(w_ENK.dtype).run
    assert run is not None, "callers ask `serves`"
    return run(x_RK, w_ENK, experts_B, rows_B4)


@cache
def loop_for(dtype: torch.dtype) -> Loop:
    """Make the loop for weights of this type."""
    x_RK, w_ENK = example_values(7, 48), example_values(5, 40, 48, dtype=dtype)
    experts_B, rows_B4 = torch.tensor([4, 0, 1]).int(), torch.arange(12).view(3, ROWS).int() % 7
    return make_loop(_blocks_times_weights, (x_RK, w_ENK, experts_B, rows_B4))


def _blocks_times_weights(
    x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_B4: Tensor
) -> Tensor:
    w_BNK = w_ENK[experts_B].to(x_RK.dtype)
    return torch.stack([(w_BNK * x_RK[rows_B4[:, i]][:, None]).sum(-1) for i in range(ROWS)], dim=1)
