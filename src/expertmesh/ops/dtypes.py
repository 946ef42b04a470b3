"""Dtypes in which operators compute: accumulation, autocast, and products on this machine's CPU."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: FP64 for FP64, FP32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on this device now; None if it is off.

    The meta device has no autocast, and torch raises when asked about it there.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; a null context if autocast is off anyway."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def gemm_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of matrices of this dtype are fast on this device.

    A CPU without FP16 (or BF16) instructions multiplies such matrices 4 to 100 times slower than FP32 ones.
    """
    if device.type != "cpu":
        return dtype
    return dtype if has_products_of(dtype) else torch.float32


@cache
def has_products_of(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has instructions for products of this dtype."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
