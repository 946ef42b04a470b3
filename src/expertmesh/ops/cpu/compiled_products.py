"""Few rows times the weights of many experts on a CPU, as fast as memory gives the weights.

A BLAS library packs a weight before it multiplies it, which pays from some ten rows on; with fewer, reading the weight is
all there is to do, and packing takes as long again. A loop of our own reads a weight once for up to four rows
(docs/log.md has the times). It is for weights that no cache of the processor holds.
"""

from functools import cache, partial

import torch
from torch import Tensor

from expertmesh.ops.cpu.compiled_loops import DTYPES, Loop, example_values, make_loop
from expertmesh.ops.cpu.products import mkl_holds_back
from expertmesh.ops.dtypes import has_products_of

SMALLEST = 1 << 23
"""Elements of a weight from which a loop is made: 16 MiB in BF16."""
ROWS = (1, 2, 4)
"""That a loop may take at once; it keeps their sums in registers."""
_OVER_BLOCKS_AND_COLUMNS = {"cpp.threads": 256, "cpp.min_chunk_size": 1}
"""So that threads share out the columns too: there may be fewer blocks than cores. How many there are, the call says."""
_ROW_ELEMENTS = 1 << 12
"""Of the rows taken at once, in FP32: 16 KiB, a third of a first-level cache. With more, they are read at half the speed."""


def rows_at_once(w_ENK: Tensor, sizes: list[int]) -> int:
    """How many rows `product` had better take at once, where it is faster than packing the weights; else 0.

    The first large weights of a type have a loop made.

    Args:
        w_ENK: (E, N, K).
        sizes: the number of rows of each expert that has any.
    """
    if w_ENK.numel() < SMALLEST or w_ENK.dtype not in DTYPES:
        return 0
    if min(w_ENK.shape) < 2 or not w_ENK.is_contiguous():
        return 0
    allowed = _rows_that_pay(w_ENK.dtype)
    if not allowed:
        return 0
    K, fullest = w_ENK.shape[2], max(sizes, default=0)
    rows = max(m for m in allowed if m == 1 or (m * K <= _ROW_ELEMENTS and m < 2 * fullest))
    num_blocks = sum(-(-size // rows) for size in sizes)
    # each block reads its weight, more slowly with four rows; packing once takes as long as reading up to twice
    if not 1 < num_blocks <= (2 if rows == 4 else 1.5) * len(sizes):
        return 0
    return rows if loop_for(w_ENK.dtype, rows).run is not None else 0


def _rows_that_pay(dtype: torch.dtype) -> tuple[int, ...]:
    """Of `ROWS`: where MKL has the processor's own code it reads FP32 weights as fast as a loop, and four rows in BF16 are its."""
    if mkl_holds_back() or not has_products_of(dtype):
        return ROWS
    return () if dtype == torch.float32 else ROWS[:2]


def product(x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_BM: Tensor) -> Tensor:
    """Multiply blocks of rows by their experts' weights, transposed; with FP32 sums, and not seen by autograd.

    A row's sums are made in the same order whatever the other rows are; another M may have another order.

    Args:
        x_RK: (R, K) FP32, contiguous, R at least 2.
        w_ENK: (E, N, K) for which `rows_at_once` gave M.
        experts_B: (B,) int32 in [0, E), not checked; B at least 2.
        rows_BM: (B, M) int32 in [0, R), not checked: which rows of x; a block of fewer names one of them again.

    Returns:
        (B, M, N) FP32.
    """
    return loop_for(w_ENK.dtype, rows_BM.shape[1])(x_RK, w_ENK, experts_B, rows_BM)


@cache
def loop_for(dtype: torch.dtype, rows: int) -> Loop:
    """Make the loop for weights of this type and so many rows at once."""
    x_RK, w_ENK = example_values(7, 48), example_values(5, 40, 48, dtype=dtype)
    experts_B = torch.tensor([4, 0, 1, 3, 3, 2], dtype=torch.int32, device="cpu")
    rows_BM = torch.arange(6 * rows, dtype=torch.int32, device="cpu").view(6, rows) % 7
    example = (x_RK, w_ENK, experts_B, rows_BM)
    return make_loop(partial(_blocks_times_weights, rows), example, _OVER_BLOCKS_AND_COLUMNS)


def _blocks_times_weights(
    rows: int, x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_BM: Tensor
) -> Tensor:
    w_BNK = w_ENK[experts_B].to(x_RK.dtype)
    return torch.stack([(w_BNK * x_RK[rows_BM[:, i]][:, None]).sum(-1) for i in range(rows)], dim=1)
