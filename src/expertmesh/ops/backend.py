"""Which implementation of the operators runs, and why."""

from dataclasses import dataclass

import torch

from expertmesh.errors import ConfigError

BACKENDS = ("auto", "torch", "reference")


@dataclass(frozen=True)
class BackendReport:
    """One line of `expertmesh doctor`.

    Attributes:
        name: the implementation.
        works: whether it can run here.
        why: the reason, one line.
    """

    name: str
    works: bool
    why: str


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Give the implementation that runs for tensors of this device and dtype.

    Args:
        backend: "auto", "torch" (per-expert GEMMs of PyTorch) or "reference" (plain autograd, slow).
        device: where the tensors are.
        dtype: their floating-point type.

    Returns:
        "torch" or "reference".

    Raises:
        ConfigError: the backend is unknown or the dtype is not one the operators take.
    """
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend is {backend!r}; known are {', '.join(BACKENDS)}; use one of these"
        )
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"dtype is {dtype}; the operators take float64, float32, bfloat16 and float16; convert the input"
        )
    return "torch" if backend == "auto" else backend


def gemm_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Give the type in which products of matrices of this type are fast on this device.

    A CPU without FP16 (or BF16) instructions multiplies such matrices 4 to 100 times slower than FP32 ones.
    """
    if device.type != "cpu":
        return dtype
    mkldnn = torch.ops.mkldnn
    if dtype == torch.float16 and not mkldnn._is_mkldnn_fp16_supported():
        return torch.float32
    if dtype == torch.bfloat16 and not mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return dtype


def gemm_rows(num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Give the number of rows to multiply where there are num_rows: up to 1/32 more, so that few counts occur.

    PyTorch's CPU products of BF16 and FP16 matrices generate code for every new shape, which takes as long as the
    product of some hundred rows, and row counts differ in every step of a training run.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return num_rows
    step = max(1, (1 << max(num_rows, 1).bit_length() - 1) // 32)
    return -(-num_rows // step) * step


def explain_backends() -> list[BackendReport]:
    """List the implementations, whether they work here, and why."""
    return [
        BackendReport(
            "torch", True, f"per-expert GEMMs of PyTorch {torch.__version__}; what auto uses"
        ),
        BackendReport("reference", True, "plain autograd, the oracle of the tests; slow"),
    ]
