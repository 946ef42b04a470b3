"""Products of few rows with the int8 matrices of many experts on a CPU, in one compiled loop over all experts.

PyTorch's product reads one matrix per call on one core. The loop divides blocks and columns among the cores and keeps H
in FP32 (docs/log.md has the times). Like the loops of `ops/cpu/compiled_products.py` it needs a C++ compiler and is for
large weights.
"""

from functools import cache, partial

import torch
from torch import Tensor

from expertmesh.ops.cpu.compiled_loops import Loop, example_values, make_loop

SMALLEST = 1 << 23
"""Fewest numbers of a weight for which loops are compiled."""
ROWS = (1, 2)
"""Numbers of rows that a loop can take at once."""
_OVER_BLOCKS_AND_COLUMNS = {"cpp.threads": 256, "cpp.min_chunk_size": 1}
"""See `ops/cpu/compiled_products.py`."""


def is_there(w_ENK: Tensor, num_blocks: int) -> bool:
    """Whether a loop can multiply `num_blocks` blocks of rows by this weight; the first call for a large weight compiles the loops."""
    return (
        num_blocks > 1
        and w_ENK.numel() >= SMALLEST
        and min(w_ENK.shape) > 1
        and w_ENK.is_contiguous()
        and all(_loop(rows).run is not None for rows in ROWS)
    )


def product(rows_RK: Tensor, w_ENK: Tensor, scales_EN: Tensor, counts: dict[int, int]) -> Tensor:
    """Multiply rows by the transposed matrices of their experts, (R, N) FP32.

    Args:
        rows_RK: rows sorted by expert, R at least 2.
        w_ENK: (E, N, K) int8 for which `is_there` is True.
        scales_EN: (E, N) BF16.
        counts: number of rows by expert, for experts with rows, in order.
    """
    at_once = 1 if max(counts.values()) == 1 else 2
    x_RK = rows_RK.float().contiguous()
    if at_once == 1:
        blocks = torch.tensor([*counts], dtype=torch.int32)
        alone: Tensor = _loop(1)(x_RK, w_ENK, scales_EN, blocks, _in_turn(len(counts)))
        return alone.flatten(0, 1)
    experts: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    start = 0
    for e, count in counts.items():
        for first in range(start, start + count, at_once):
            here = range(first, min(first + at_once, start + count))
            places += range(len(rows), len(rows) + len(here))
            rows += here
            rows += [first] * (at_once - len(here))
            experts.append(e)
        start += count
    blocks = torch.tensor(experts, dtype=torch.int32)
    rows_BM = torch.tensor(rows, dtype=torch.int32).view(-1, at_once)
    found = _loop(at_once)(x_RK, w_ENK, scales_EN, blocks, rows_BM)
    out: Tensor = found.flatten(0, 1)
    return out if len(places) == len(rows) else out.index_select(0, torch.tensor(places))


@cache
def _in_turn(count: int) -> Tensor:
    """(count, 1) row indices in which each row is a block."""
    return torch.arange(count, dtype=torch.int32)[:, None]


@cache
def _loop(rows: int) -> Loop:
    """Compile the loop for this number of rows at once."""
    numbers = 2.0 * example_values(5, 40, 48)
    w_ENK, scales_EN = numbers.clamp(-3, 3).to(torch.int8), example_values(5, 40).bfloat16()
    experts_B = torch.tensor([4, 0, 1, 3, 3, 2], dtype=torch.int32, device="cpu")
    rows_BM = torch.arange(6 * rows, dtype=torch.int32, device="cpu").view(6, rows) % 7
    example = (example_values(7, 48), w_ENK, scales_EN, experts_B, rows_BM)
    return make_loop(partial(_blocks_times_weights, rows), example, _OVER_BLOCKS_AND_COLUMNS)


def _blocks_times_weights(
    rows: int, x_RK: Tensor, w_ENK: Tensor, scales_EN: Tensor, experts_B: Tensor, rows_BM: Tensor
) -> Tensor:
    w_BNK, s_BN = w_ENK[experts_B].to(x_RK.dtype), scales_EN[experts_B].to(x_RK.dtype)
    columns = [(w_BNK * x_RK[rows_BM[:, i]][:, None]).sum(-1) * s_BN for i in range(rows)]
    return torch.stack(columns, dim=1)
