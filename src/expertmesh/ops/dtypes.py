"""Which types operators compute in: of sums, of autocast, and of products on this machine's CPU."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the type sums are taken in: FP64 for FP64, FP32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Give the type that autocast computes in on this device now; None where it is off.

    The meta device has no autocast, and torch raises when asked about it there.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Give a region in which nothing is cast; free where autocast is off anyway."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def gemm_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Give the type in which products of matrices of this type are fast on this device.

    A CPU without FP16 (or BF16) instructions multiplies such matrices 4 to 100 times slower than FP32 ones.
    """
    if device.type != "cpu":
        return dtype
    return dtype if has_products_of(dtype) else torch.float32


@cache
def has_products_of(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has instructions for products of this type."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
