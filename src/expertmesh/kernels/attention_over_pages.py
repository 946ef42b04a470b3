"""Attention over pages: a row has the same bits alone and in every batch, by chunks, and for any number of programs.

A program computes the rows of a few queries for query heads that share a key head, over parts of PART_KEYS keys that
are counted from a sequence's first key. Keys that a row does not see add exact zeros. Parts are merged in order by the
same operations, in the loop of one program or by a second kernel from the results of several. So neither the other rows
of a tile, nor the width of the block table, nor the number of programs changes a bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels import tiles
from expertmesh.kernels.launch import launch, next_power_of_2

PART_KEYS = 512
"""Keys of a part."""
_MOST_PARTS_BYTES = 1 << 26
"""Bytes of the parts' results up to which parts are computed side by side."""
_WAVES = 4
"""Programs per multiprocessor from which parts are not computed side by side."""
_MERGED_ROWS = 16
_LEAST = 16
"""Smallest side of a matrix product."""
_KEYS = 32
"""Keys of a product: more do not fit the registers of every GPU."""
_CHUNK = 64
"""Numbers of a wide head's queries and keys that are multiplied at once."""
_WIDE = 128
"""Numbers of a head from which tiles are small, as accumulators fill the registers."""


@triton.jit
def _merge(most, total, y, y_rest, part_most, part_total, part, part_rest, REST: tl.constexpr):
    """Add a part to the parts before it; a part without a key has the maximum -inf and changes no bit."""
    new_most = tl.maximum(most, part_most)
    finite = tl.where(new_most == float("-inf"), 0.0, new_most)
    before, after = tl.exp(most - finite), tl.exp(part_most - finite)
    # an FMA of our own, as the compiler's choice could differ between the kernels
    total = tl.fma(total, before, part_total * after)
    y = tl.fma(y, before[:, None] + tl.zeros_like(y), part * after[:, None])
    if REST > 0:
        y_rest = tl.fma(y_rest, before[:, None] + tl.zeros_like(y_rest), part_rest * after[:, None])
    return new_most, total, y, y_rest


@triton.jit
def _capped(s, CAP: tl.constexpr):
    """CAP tanh(s / CAP), by a series near 0, where the quotient of exponentials cancels."""
    x = s / CAP
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return CAP * tl.where(square < 0.01, near, tl.where(x < 0, -far, far))


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First key that queries at these positions see."""
    first = tl.zeros_like(position)
    if WINDOW is not None:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK is not None:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _sequence_of(tile, starts_ptr, num_sequences, BINS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Sequence of a tile: the tiles of sequence b begin at starts[b] // BLOCK_Q + b, room for all, whatever the numbers
    of queries."""
    bins = tl.arange(0, BINS)
    inside = bins < num_sequences
    first_tiles = tl.load(starts_ptr + bins, mask=inside, other=0) // BLOCK_Q + bins
    return (tl.sum((inside & (first_tiles <= tile)).to(tl.int32), 0) - 1).to(tl.int64)


@triton.jit
def _products(
    q,
    q_rows,
    keys,
    is_row,
    is_key,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of queries and keys; of wide heads by pieces, as the registers do not hold a whole row of queries."""
    d = tl.arange(0, BLOCK_D)
    if BLOCK_D >= DIM:
        is_k = (d < DIM)[:, None] & is_key[None, :]
        k = tl.load(keys[None, :] + d[:, None], mask=is_k, other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
    else:
        s = tl.zeros((is_row.shape[0], is_key.shape[0]), tl.float32)
        for i in tl.range(0, DIM, BLOCK_D):
            some = i + d
            is_q = is_row[:, None] & (some < DIM)[None, :]
            some_q = tl.load(q_rows[:, None] + some[None, :], mask=is_q, other=0.0)
            is_k = (some < DIM)[:, None] & is_key[None, :]
            k = tl.load(keys[None, :] + some[:, None], mask=is_k, other=0.0)
            s = tl.dot(some_q, k, s, input_precision=PRECISION)
    return s


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "table_stride", "mask_stride"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    y_ptr,
    sinks_ptr,
    starts_ptr,
    num_keys_ptr,
    table_ptr,
    mask_ptr,
    parts_ptr,
    statistics_ptr,
    num_sequences,
    num_rows,
    table_stride,
    mask_stride,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_page,
    k_stride_slot,
    k_stride_h,
    v_stride_page,
    v_stride_slot,
    v_stride_h,
    num_heads,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REST_V: tl.constexpr,
):
    """Attend with a tile of queries and query heads; with parts_ptr to one part of the keys, whose result is kept
    there."""
    tile, part_id = tl.program_id(0), tl.program_id(2)
    head_blocks: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    key_head = (tl.program_id(1) // head_blocks).to(tl.int64)
    b = _sequence_of(tile, starts_ptr, num_sequences, BINS, BLOCK_Q)
    start, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    query = (tile - (start // BLOCK_Q + b)) * BLOCK_Q
    if start + query >= stop:
        return
    num_keys = tl.load(num_keys_ptr + b)
    row = tl.arange(0, BLOCK_Q * BLOCK_G)
    own_query = query + row // BLOCK_G
    head_of_group = tl.program_id(1) % head_blocks * BLOCK_G + row % BLOCK_G
    t = start + own_query
    head = key_head * GROUP + head_of_group
    is_row = (t < stop) & (head_of_group < GROUP)
    position = num_keys - (stop - start) + own_query
    first = _first_seen(position, WINDOW, CHUNK)
    last_query = tl.minimum(query + BLOCK_Q, stop - start) - 1
    high = tl.maximum(num_keys - (stop - start) + last_query + 1, 0)
    low = tl.maximum(num_keys - (stop - start) + query, 0)
    low = tl.minimum(_first_seen(low, WINDOW, CHUNK), high)
    d, v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q_rows = q_ptr + t * q_stride_t + head * q_stride_h
    q = row
    if BLOCK_D >= DIM:
        q = tl.load(q_rows[:, None] + d[None, :], mask=is_row[:, None] & (d < DIM)[None, :], other=0.0)
    if REST_V > 0:
        v_rest = BLOCK_V + tl.arange(0, REST_V)
    most = tl.full((BLOCK_Q * BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q * BLOCK_G,), tl.float32)
    y = tl.zeros((BLOCK_Q * BLOCK_G, BLOCK_V), tl.float32)
    y_rest = total  # no rest
    if REST_V > 0:
        y_rest = tl.zeros((BLOCK_Q * BLOCK_G, REST_V), tl.float32)
    if parts_ptr is None:
        first_part, stop_part = low // PART, (high + PART - 1) // PART
        if sinks_ptr is not None:
            most = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
            total += 1.0
    else:
        first_part = tl.maximum(low // PART, part_id)
        stop_part = tl.minimum((high + PART - 1) // PART, part_id + 1)
    for part in tl.range(first_part, stop_part):
        own_most = tl.full((BLOCK_Q * BLOCK_G,), float("-inf"), tl.float32)
        own_total = tl.zeros((BLOCK_Q * BLOCK_G,), tl.float32)
        own = tl.zeros((BLOCK_Q * BLOCK_G, BLOCK_V), tl.float32)
        own_rest = own_total
        if REST_V > 0:
            own_rest = tl.zeros((BLOCK_Q * BLOCK_G, REST_V), tl.float32)
        begin = tl.maximum(part * PART, low // BLOCK_K * BLOCK_K)
        end = tl.minimum((part + 1) * PART, high)
        for at in tl.range(begin, end, BLOCK_K):
            key = at + tl.arange(0, BLOCK_K)
            is_key = (key >= low) & (key < high)
            page = tl.load(table_ptr + b * table_stride + key // PAGE, mask=is_key, other=0)
            slot = key % PAGE
            keys = k_ptr + page * k_stride_page + slot * k_stride_slot + key_head * k_stride_h
            values = v_ptr + page * v_stride_page + slot * v_stride_slot + key_head * v_stride_h
            s = _products(q, q_rows, keys, is_row, is_key, DIM, BLOCK_D, PRECISION) * scale
            if CAP is not None:
                s = _capped(s, CAP)
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            is_seen &= key[None, :] >= first[:, None]
            if mask_ptr is not None:
                word = tl.load(mask_ptr + t * mask_stride + at // BLOCK_K, mask=is_row, other=0)
                is_seen &= ((word[:, None] >> tl.arange(0, BLOCK_K)[None, :]) & 1) != 0
            s = tl.where(is_seen, s, float("-inf"))
            new_most = tl.maximum(own_most, tl.max(s, 1))
            finite = tl.where(new_most == float("-inf"), 0.0, new_most)
            before = tl.exp(own_most - finite)
            p = tl.exp(s - finite[:, None])
            own_total = own_total * before + tl.sum(p, 1)
            rounded = p.to(v_ptr.dtype.element_ty)
            is_v = is_key[:, None] & (v < SIZE)[None, :]
            value = tl.load(values[:, None] + v[None, :], mask=is_v, other=0.0)
            own = tl.dot(rounded, value, own * before[:, None], input_precision=PRECISION)
            if REST_V > 0:
                is_rest = is_key[:, None] & (v_rest < SIZE)[None, :]
                rest = tl.load(values[:, None] + v_rest[None, :], mask=is_rest, other=0.0)
                own_rest = tl.dot(rounded, rest, own_rest * before[:, None], input_precision=PRECISION)
            own_most = new_most
        if parts_ptr is None:
            most, total, y, y_rest = _merge(most, total, y, y_rest, own_most, own_total, own, own_rest, REST_V)
        else:
            most, total, y, y_rest = own_most, own_total, own, own_rest
    if parts_ptr is None:
        divisor = tl.where(total > 0, total, 1.0)[:, None]
        y /= divisor
        out = y_ptr + (t * num_heads + head) * SIZE
        if REST_V > 0:
            y_rest /= divisor
    else:
        place = (part_id.to(tl.int64) * num_rows + t) * num_heads + head
        statistics = statistics_ptr + place * 2
        tl.store(statistics, most, mask=is_row)
        tl.store(statistics + 1, total, mask=is_row)
        is_row &= first_part < stop_part
        out = parts_ptr + place * SIZE
    kind = out.dtype.element_ty
    is_y = is_row[:, None] & (v < SIZE)[None, :]
    tl.store(out[:, None] + v[None, :], y.to(kind), mask=is_y)
    if REST_V > 0:
        is_y_rest = is_row[:, None] & (v_rest < SIZE)[None, :]
        tl.store(out[:, None] + v_rest[None, :], y_rest.to(kind), mask=is_y_rest)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def _merge_parts(
    parts_ptr,
    statistics_ptr,
    y_ptr,
    sinks_ptr,
    num_parts,
    num_rows,
    num_heads,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge the parts of some rows and heads, in order; reads no result of a part without a key."""
    v = tl.arange(0, BLOCK_V)
    number = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    size = num_rows.to(tl.int64) * num_heads
    is_row = number < size
    most = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    y = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    if sinks_ptr is not None:
        most = tl.load(sinks_ptr + number % num_heads, mask=is_row, other=0.0)
        total += 1.0
    for part in tl.range(0, num_parts):
        place = part * size + number
        own_most = tl.load(statistics_ptr + place * 2, mask=is_row, other=float("-inf"))
        own_total = tl.load(statistics_ptr + place * 2 + 1, mask=is_row, other=0.0)
        mask = (own_most > float("-inf"))[:, None] & (v < SIZE)[None, :]
        own = tl.load(parts_ptr + place[:, None] * SIZE + v[None, :], mask=mask, other=0.0)
        most, total, y, _ = _merge(most, total, y, y, own_most, own_total, own, own, 0)
    y /= tl.where(total > 0, total, 1.0)[:, None]
    out = y_ptr + number[:, None] * SIZE + v[None, :]
    mask = is_row[:, None] & (v < SIZE)[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch: from the sizes of heads and the type, so that a row's sums do not depend on the batch."""

    queries: int  # queries of a tile
    heads: int  # query heads of a tile
    head_blocks: int  # tiles that a key head's query heads need
    constants: dict[str, int]  # blocks of the kernel
    num_stages: int

    @classmethod
    def of(cls, group: int, d: int, n: int, dtype: torch.dtype) -> "Tiles":
        """Tiles for `group` query heads of a key head, keys of d and values of n numbers."""
        is_small = max(d, n) > _WIDE or dtype == torch.float32
        rows = _LEAST if is_small else 64
        heads = min(next_power_of_2(group), rows)
        queries = rows // heads
        block_d = min(max(next_power_of_2(d), _LEAST), _CHUNK if is_small else _WIDE)
        block_v, rest_v = in_two(n)
        constants = {"BLOCK_Q": queries, "BLOCK_G": heads, "BLOCK_K": _KEYS}
        constants |= {"BLOCK_D": block_d, "BLOCK_V": block_v, "REST_V": rest_v}
        return cls(queries, heads, triton.cdiv(group, heads), constants, 1 if is_small else 2)


def in_two(size: int) -> tuple[int, int]:
    """Two powers of two that hold a size, the second 0 if one fits: 576 is 512 + 64, not 1024."""
    whole = max(next_power_of_2(size), _LEAST)
    if whole == max(size, _LEAST) or whole == _LEAST:
        return whole, 0
    rest = max(next_power_of_2(size - whole // 2), _LEAST)
    return (whole, 0) if rest >= whole // 2 else (whole // 2, rest)


def _words(mask_TL: Tensor) -> Tensor:
    """Bits of a mask, (T, L / 32) int32, a word for the keys of a product; the first key is the lowest bit."""
    bits = F.pad(mask_TL, (0, -mask_TL.shape[1] % _KEYS)).unflatten(1, (-1, _KEYS)).to(torch.int32)
    return (bits << torch.arange(_KEYS, dtype=torch.int32, device=bits.device)).sum(-1, dtype=torch.int32)


def attend(
    q_THd: Tensor,  # (T, H, d) queries, BF16, FP16 or FP32; the last axis of all three is contiguous
    k_NShd: Tensor,  # (pages, page size, heads, d) keys
    v_NShd: Tensor,  # (pages, page size, heads, n) values
    starts: Tensor,  # (B + 1,) int64 first rows
    num_keys_B: Tensor,  # (B,) int64 keys
    table_BN: Tensor,  # (B, N) int64 pages
    sinks_H: Tensor | None,  # (H,) sinks
    window: int | None,  # keys of the window
    chunk: int | None,  # positions of a chunk
    softcap: float | None,  # the soft cap
    *,
    mask_TL: Tensor | None = None,
    side_by_side: bool | None = None,
) -> Tensor:
    """Compute the attention, (T, H, n); does not synchronise.

    Args:
        mask_TL: (T, L) bool, True for keys of a row's sequence that it may see; None: all of the rule.
        side_by_side: whether programs compute the parts side by side; None: as fills the GPU. Bits are the same.
    """
    (T, H, d), (_, page, heads, n), B = q_THd.shape, v_NShd.shape, len(num_keys_B)
    y_THd = q_THd.new_empty(T, H, n)
    tile = Tiles.of(H // heads, d, n, q_THd.dtype)
    num_parts = triton.cdiv(table_BN.shape[1] * page, PART_KEYS)
    programs = (T // tile.queries + B, heads * tile.head_blocks)
    if side_by_side is None:
        fills = programs[0] * programs[1] >= _WAVES * tiles.multiprocessors(q_THd.device)
        parts_bytes = 4 * num_parts * T * H * n
        side_by_side = num_parts > 1 and not fills and parts_bytes <= _MOST_PARTS_BYTES
    parts = statistics = None
    if side_by_side:
        parts = q_THd.new_empty(num_parts, T, H, n, dtype=torch.float32)
        statistics = q_THd.new_empty(num_parts, T, H, 2, dtype=torch.float32)
    sinks = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
    words = None if mask_TL is None else _words(mask_TL)
    constants: dict[str, Any] = {
        "GROUP": H // heads,
        "PAGE": page,
        "DIM": d,
        "SIZE": n,
        "WINDOW": window,
        "CHUNK": chunk,
        "CAP": softcap,
        "PRECISION": "ieee" if q_THd.dtype == torch.float32 else "tf32",
        "PART": PART_KEYS,
        "BINS": next_power_of_2(B),
    }
    launch(
        _attend,
        (*programs, num_parts if side_by_side else 1),
        q_THd,
        k_NShd,
        v_NShd,
        y_THd,
        sinks,
        starts,
        num_keys_B,
        table_BN,
        words,
        parts,
        statistics,
        B,
        T,
        table_BN.stride(0),
        0 if words is None else words.stride(0),
        d**-0.5,
        *q_THd.stride()[:2],
        *k_NShd.stride()[:3],
        *v_NShd.stride()[:3],
        H,
        **constants,
        **tile.constants,
        num_warps=8,
        num_stages=tile.num_stages,
    )
    if side_by_side:
        launch(
            _merge_parts,
            (triton.cdiv(T * H, _MERGED_ROWS),),
            parts,
            statistics,
            y_THd,
            sinks,
            num_parts,
            T,
            H,
            SIZE=n,
            BLOCK_R=_MERGED_ROWS,
            BLOCK_V=next_power_of_2(n),
            num_warps=4,
        )
    return y_THd
