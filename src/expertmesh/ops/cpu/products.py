"""FP32 matrix products on the CPU by the faster of PyTorch's two libraries.

`torch.mm` and `F.linear` use MKL for FP32, which runs AVX2 code on all processors that are not Intel's. oneDNN
generates code for the instructions that the processor has: on an AMD EPYC with AVX-512 it is 2.2 times as fast
(docs/log.md). The arithmetic is the same, FP32 with FP32 sums.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.onednn import has_onednn
from expertmesh.ops.plain_call import is_plain, runs_plainly

Library = Literal["blas", "onednn"]
"""Library for large FP32 matrices: PyTorch's BLAS (MKL on x86), or oneDNN."""

_SMALLEST = 1 << 20
"""Fewest multiply-adds for which a product is worth oneDNN's call overhead of 15 us."""

_chosen: Library | None = None


@cache
def mkl_holds_back() -> bool:
    """Whether MKL would run AVX2 code for FP32 products on a processor that has AVX-512."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and has_onednn()
        and cpuinfo.exists()
        and runs_avx2_code(cpuinfo.read_text(), torch.backends.cpu.get_cpu_capability())
    )


def runs_avx2_code(cpuinfo: str, capability: str) -> bool:
    """Whether MKL runs AVX2 code on a processor with AVX-512.

    Args:
        cpuinfo: the text of /proc/cpuinfo.
        capability: PyTorch's CPU capability, for example "AVX512".
    """
    return capability == "AVX512" and "GenuineIntel" not in cpuinfo


def usual_library() -> Library:
    """Library for large FP32 matrices unless `multiplying_by` chooses another."""
    return "onednn" if mkl_holds_back() else "blas"


@contextmanager
def multiplying_by(library: Library) -> Iterator[None]:
    """Context in which one library multiplies large FP32 matrices in this process; BLAS does if there is no oneDNN."""
    global _chosen
    before, _chosen = _chosen, library
    try:
        yield
    finally:
        _chosen = before


def goes_to_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `product` uses oneDNN for large matrices of this dtype; oneDNN generates code for every new shape."""
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and (_chosen or usual_library()) == "onednn"
        and has_onednn()
        and torch._C._get_mkldnn_enabled()
    )


def gemm_rows(num_rows: int, device: torch.device, dtype: torch.dtype, *, is_coarse: bool = False) -> int:
    """Round a number of rows up for a product, by up to 1/32, so that few shapes occur.

    PyTorch's CPU products of BF16 and FP16 matrices, and oneDNN's of FP32 ones, generate code for every new shape. That
    takes as long as a product of some hundred rows, and row counts differ in every training step.

    Args:
        is_coarse: round by up to 1/8: where generating code takes as long as ten products, or where so many kinds of
            products are called that oneDNN's cache, of 1,024 codes of half a megabyte, would not hold all of them.
    """
    is_half = device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
    if not is_half and not goes_to_onednn(dtype, device):
        return num_rows
    step = max(1, (1 << max(num_rows, 1).bit_length() - 1) // (8 if is_coarse else 32))
    return -(-num_rows // step) * step


def product_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, add: bool = False) -> None:
    """Write the product a b into a tensor, or add it; not seen by autograd."""
    if is_worth_it(a_MK, b_KN):
        found = _onednn(a_MK, b_KN)
        if add:
            out_MN.add_(found)
        else:
            out_MN.copy_(found)
    elif add:
        torch.addmm(out_MN, a_MK, b_KN, out=out_MN)
    else:
        torch.mm(a_MK, b_KN, out=out_MN)


def linear_into(x_MK: Tensor, w_NK: Tensor, out_MN: Tensor, *, bias_N: Tensor) -> None:
    """Write x w^T + bias into a tensor, rounded once; not seen by autograd."""
    if is_worth_it(x_MK, w_NK.T):
        out_MN.copy_(_onednn(x_MK, w_NK.T, bias_N))
    else:
        torch.addmm(bias_N, x_MK, w_NK.T, out=out_MN)


def is_worth_it(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether this product goes to oneDNN."""
    size = a_MK.shape[0] * a_MK.shape[1] * b_KN.shape[1]
    return size >= _SMALLEST and goes_to_onednn(a_MK.dtype, a_MK.device)


def _onednn(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Product by oneDNN, which copies its first operand if not contiguous; the smaller of two such operands goes
    first."""
    swap = bias_N is None and not a_MK.is_contiguous() and b_KN.shape[1] < a_MK.shape[0]
    x, w = (b_KN.T, a_MK) if swap else (a_MK, b_KN.T)
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, bias_N, "none", [], "")
    return y.T if swap else y


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Compute a b; differentiable any number of times. oneDNN is used only without gradients."""
    if runs_plainly(a_MK, b_KN) and is_worth_it(a_MK, b_KN):
        return _onednn(a_MK, b_KN)
    return a_MK @ b_KN


def linear(x: Tensor, w_NK: Tensor) -> Tensor:
    """Compute `torch.nn.functional.linear` without bias; differentiable, twice only if F.linear itself runs."""
    rows = x.numel() // max(x.shape[-1], 1)
    if (
        not is_plain(x, w_NK)
        or rows * w_NK.numel() < _SMALLEST
        or not goes_to_onednn(x.dtype, x.device)
        or w_NK.dtype != x.dtype
        or autocast_dtype(x.device) is not None
    ):
        return F.linear(x, w_NK)
    y: Tensor = _Linear.apply(x.reshape(rows, -1), w_NK)
    # Not a view, as F.linear's result is none: FSDP2 warns about views that a module returns.
    whole: Tensor = torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], w_NK.shape[0]])
    return whole


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        return _onednn(x_MK, w_NK.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, w_NK = ctx.saved_tensors
        dx = _onednn(grad_MN, w_NK) if ctx.needs_input_grad[0] else None
        dw = _onednn(grad_MN.T, x_MK).contiguous() if ctx.needs_input_grad[1] else None
        return dx, dw


def grouped_mm_serves(w_ENK: Tensor, num_live: int) -> bool:
    """Whether PyTorch's grouped product is the fastest choice if this many experts have rows.

    On the CPU it is the same loop without Python, over all experts, including those without rows. Its requirements
    (bytes of a row, contiguous weights) are checked here.
    """
    by_the_best_library = w_ENK.dtype == torch.bfloat16 or (w_ENK.dtype == torch.float32 and not mkl_holds_back())
    return (
        w_ENK.device.type == "cpu"
        and by_the_best_library
        and 4 * num_live >= w_ENK.shape[0]
        # the stride, not the width: of matrices of one row it may be another
        and w_ENK.stride(1) * w_ENK.element_size() % 16 == 0
        and w_ENK.is_contiguous()
    )


def selected(values: Tensor, indices: Sequence[int]) -> Iterator[Tensor]:
    """Select entries along the first dimension; one unbind of all entries is cheaper if more than half are wanted."""
    if 2 * len(indices) > values.shape[0]:
        return map(values.unbind().__getitem__, indices)
    return (values.select(0, i) for i in indices)
