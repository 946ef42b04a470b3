"""Products with FP32 accuracy on tensor cores: FP32 factors are split into two or three BF16 parts.

Three BF16 numbers hold the 24 bits of an FP32 number, and a product of two BF16 numbers is exact in FP32, so only sums
round. Tensor cores truncate addends of a large sum. Each step's sum therefore starts at zero and is added to the total
outside.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels import tiles
from expertmesh.kernels.launch import launch, next_power_of_2

_SPLIT_BLOCK = 1024
_ALIGNED = 16
_NEVER_SPECIALIZED = ["M", "K", "steps_of_piece"]


@triton.jit(do_not_specialize=["size"])
def _split(source_ptr, out_ptr, size, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out[i] = the i-th BF16 part of every number: the rounded remainder after the parts before."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    next_part = tl.cast(stride, tl.int64)
    rest = tl.load(source_ptr + place, mask=inside, other=0.0)
    for i in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        tl.store(out_ptr + i * next_part + place, part, mask=inside)
        rest -= part.to(tl.float32)


@triton.jit(do_not_specialize=_NEVER_SPECIALIZED)
def _split_product(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    steps_of_piece,
    a_stride_part,
    a_stride_m,
    a_stride_k,
    b_stride_part,
    b_stride_k,
    b_stride_n,
    A_PARTS: tl.constexpr,
    B_PARTS: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute out[piece] (M, N) = A B over a piece of K; either factor is the sum of its parts."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    piece = tl.program_id(2)
    # counted in steps, so that the compiler sees aligned addresses and uses asynchronous copies
    num_steps = tl.minimum(steps_of_piece, tl.cdiv(K, BLOCK_K) - piece * steps_of_piece)
    # the compiler knows nothing about M: its mask would prevent wide copies if A is contiguous along M
    m_inside = ((m < M) | EVEN_M)[:, None]
    n_inside = (n < N)[None, :]
    a_rows = a_ptr + m.to(tl.int64)[:, None] * a_stride_m
    b_columns = b_ptr + n.to(tl.int64)[None, :] * b_stride_n
    a_next_part = tl.cast(a_stride_part, tl.int64)
    b_next_part = tl.cast(b_stride_part, tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, num_steps):
        k = (piece * steps_of_piece + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_block = a_rows + k.to(tl.int64)[None, :] * a_stride_k
        b_block = b_columns + k.to(tl.int64)[:, None] * b_stride_k
        a_inside = m_inside if EVEN_K else m_inside & (k < K)[None, :]
        b_inside = n_inside if EVEN_K else n_inside & (k < K)[:, None]
        fresh = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.static_range(A_PARTS):
            a = tl.load(a_block + i * a_next_part, mask=a_inside, other=0.0)
            # with two parts each, the product of the smaller ones is below the last significant bit
            for j in tl.static_range(B_PARTS - i if A_PARTS == B_PARTS else B_PARTS):
                b = tl.load(b_block + j * b_next_part, mask=b_inside, other=0.0)
                fresh = tl.dot(a, b, fresh)
        total += fresh
    out = out_ptr + (piece.to(tl.int64) * M + m.to(tl.int64)[:, None]) * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=m_inside & n_inside)


def split(tensor: Tensor, num_parts: int) -> Tensor:
    """Split an FP32 tensor into (parts, ...) BF16 numbers that sum to it: exactly with three, to 16 bits with two. One
    launch."""
    tensor = tensor.contiguous()
    size = tensor.numel()
    # parts are a multiple of 16 numbers apart, so that another number of tokens compiles no new kernel
    stride = triton.cdiv(size, _ALIGNED) * _ALIGNED
    parts = torch.empty(num_parts, stride, dtype=torch.bfloat16, device=tensor.device)
    grid, constants = (
        (triton.cdiv(size, _SPLIT_BLOCK),),
        {"PARTS": num_parts, "BLOCK": _SPLIT_BLOCK},
    )
    launch(_split, grid, tensor, parts, size, stride, **constants, num_warps=4)
    return parts[:, :size].view(num_parts, *tensor.shape)


def _strides(factor: Tensor) -> tuple[int, ...]:
    """Strides of a factor in parts; 0 between parts if there is one, because that stride would depend on the number of
    tokens."""
    part, *others = factor.stride()
    return (part if factor.shape[0] > 1 else 0, *others)


def _product(a_ZMK: Tensor, b_ZKN: Tensor, *, dtype: torch.dtype, long_sum: bool) -> Tensor:
    """Multiply two sums of parts; with long_sum, K is divided among programs too."""
    (_, M, K), N = a_ZMK.shape, b_ZKN.shape[2]
    cores = tiles.multiprocessors(a_ZMK.device)
    tile = tiles.split_tile(a_ZMK.device, num_rows=M, num_programs=cores)
    block_n = min(tile.block_n, max(16, next_power_of_2(N)))
    grid = (triton.cdiv(M, tile.block_m), triton.cdiv(N, block_n))
    num_steps = triton.cdiv(K, tile.block_k)
    steps_of_piece = num_steps
    if long_sum:
        steps_of_piece = triton.cdiv(num_steps, max(1, cores // (grid[0] * grid[1])))
    pieces = triton.cdiv(num_steps, steps_of_piece)
    out = torch.empty(pieces, M, N, dtype=dtype, device=a_ZMK.device)
    launch(
        _split_product,
        (*grid, pieces),
        a_ZMK,
        b_ZKN,
        out,
        M,
        N,
        K,
        steps_of_piece,
        *_strides(a_ZMK),
        *_strides(b_ZKN),
        A_PARTS=a_ZMK.shape[0],
        B_PARTS=b_ZKN.shape[0],
        EVEN_M=long_sum and M % tile.block_m == 0,
        EVEN_K=K % tile.block_k == 0 and not long_sum,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out[0] if pieces == 1 else out.sum(0)


def logits(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """Compute x W^T in FP32 (T, E): BF16 tokens times the three parts of FP32 weights, D > 0. Does not synchronise."""
    parts_ZDE = split(w_ED, 3).transpose(1, 2)
    return _product(x_TD.contiguous()[None], parts_ZDE, dtype=torch.float32, long_sum=False)


def gradients(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, *, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    """Compute the gradients of tokens and weights from the gradient of the logits; unneeded ones are empty.

    Args:
        grad_TE: (T, E) FP32.
        x_TD: (T, D) BF16.
        w_ED: (E, D) FP32.
        need_x: whether to compute grad W, BF16 (T, D); two parts of either factor, 16 bits, suffice.
        need_w: whether to compute grad^T x in FP32 (E, D), from three parts of grad; sums over pieces of T are added in
            order.
    """
    d_x, d_w = x_TD.new_empty(0), w_ED.new_empty(0)
    parts_ZTE = split(grad_TE, 3)
    if need_x:
        d_x = _product(parts_ZTE[:2], split(w_ED, 2), dtype=x_TD.dtype, long_sum=False)
    if need_w:
        x_ZTD = x_TD.contiguous()[None]
        d_w = _product(parts_ZTE.transpose(1, 2), x_ZTD, dtype=torch.float32, long_sum=True)
    return d_x, d_w
