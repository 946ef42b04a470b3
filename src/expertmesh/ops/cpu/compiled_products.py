"""Products of few rows with the weights of many experts on a CPU, limited by memory bandwidth.

A BLAS library packs a weight before the product, which pays from about ten rows on. With fewer rows, the time goes to
reading the weight, and packing takes as long again. The compiled loop here reads a weight once for up to four rows
(docs/log.md has the times). It is for weights larger than the processor's caches.
"""

from functools import cache, partial

import torch
from torch import Tensor

from expertmesh.ops.cpu.compiled_loops import DTYPES, Loop, example_values, make_loop
from expertmesh.ops.cpu.products import mkl_holds_back
from expertmesh.ops.dtypes import has_products_of

SMALLEST = 1 << 23
"""Fewest elements of a weight for which a loop is compiled: 16 MiB in BF16."""
ROWS = (1, 2, 4)
"""Numbers of rows that a loop can take at once; their sums stay in registers."""
_OVER_BLOCKS_AND_COLUMNS = {"cpp.threads": 256, "cpp.min_chunk_size": 1}
"""Inductor options that split columns among threads too, because there may be fewer blocks than cores; the call sets
the number of threads.
"""
_ROW_ELEMENTS = 1 << 12
"""Maximum number of elements of the rows taken at once: 16 KiB in FP32, a third of an L1 cache. More are read at half the speed."""


def rows_at_once(w_ENK: Tensor, sizes: list[int]) -> int:
    """Number of rows that `product` should take at once; 0 if packing the weights is faster.

    The first call for large weights of a dtype compiles a loop.

    Args:
        w_ENK: (E, N, K).
        sizes: number of rows of each expert that has rows.
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
    # each block reads its weight, more slowly with four rows; packing takes as long as reading up to twice
    if not 1 < num_blocks <= (2 if rows == 4 else 1.5) * len(sizes):
        return 0
    return rows if loop_for(w_ENK.dtype, rows).run is not None else 0


def _rows_that_pay(dtype: torch.dtype) -> tuple[int, ...]:
    """Members of `ROWS` that are faster than MKL: with the processor's own code MKL reads FP32 weights as fast as a
    loop, and wins for four BF16 rows.
    """
    if mkl_holds_back() or not has_products_of(dtype):
        return ROWS
    return () if dtype == torch.float32 else ROWS[:2]


def product(x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_BM: Tensor) -> Tensor:
    """Multiply blocks of rows by their experts' transposed weights, with FP32 sums; not seen by autograd.

    The order of a row's sum depends on M, not on the other rows.

    Args:
        x_RK: (R, K) FP32, contiguous, R at least 2.
        w_ENK: (E, N, K) for which `rows_at_once` gave M.
        experts_B: (B,) int32 in [0, E), not checked; B at least 2.
        rows_BM: (B, M) int32 rows of x in [0, R), not checked; a block with fewer rows repeats one.

    Returns:
        (B, M, N) FP32.
    """
    return loop_for(w_ENK.dtype, rows_BM.shape[1])(x_RK, w_ENK, experts_B, rows_BM)


@cache
def loop_for(dtype: torch.dtype, rows: int) -> Loop:
    """Compile the loop for weights of this dtype and this number of rows at once."""
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
