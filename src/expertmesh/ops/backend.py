"""Backends of the operators: which one runs, and why."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass

import torch

from expertmesh.config.values import other_choice
from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.instructions import NAMES
from expertmesh.kernels.cpu.library import loaded, lower

BACKENDS = ("auto", "triton", "torch", "reference")
OLDEST_TRITON = (3, 6)
OLDEST_NVIDIA_GPU = 8  # compute capability; A100
_TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")


def _triton_version() -> str | None:
    for package in _TRITON_PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _find_triton_problem() -> str | None:
    """Reason why the Triton kernels cannot be used here, or None. Does not import Triton."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _too_old(_triton_version() or "")


def _too_old(version: str) -> str | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {version} is too old, {oldest} or newer is needed"
    return None


TRITON_PROBLEM = _find_triton_problem()
"""Reason why the Triton kernels cannot be used in this process, or None."""


def runs_triton(device: torch.device) -> bool:
    """Whether backend "auto" uses Triton for tensors on this device."""
    if device.type != "cuda" or TRITON_PROBLEM is not None:
        return False
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_properties(device).major >= OLDEST_NVIDIA_GPU


@dataclass(frozen=True)
class BackendReport:
    """A backend's state for `expertmesh doctor`."""

    name: str
    works: bool  # whether it can run here
    why: str  # the reason, one line


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve "auto" and check a backend for tensors of this device and dtype.

    Args:
        backend: "auto" (triton on a GPU that it supports, else torch), "triton" (our kernels; CPU tensors run in
            Triton's interpreter, thousands of times slower: for tests and debugging), "torch" (PyTorch's own operators)
            or "reference" (plain autograd, slow).

    Returns:
        "triton", "torch" or "reference".
    """
    if backend not in BACKENDS:
        raise other_choice("backend", backend, BACKENDS)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"dtype is {dtype}; the operators take float64, float32, bfloat16 and float16; convert the input"
        )
    if backend == "triton" and TRITON_PROBLEM is not None:
        raise ConfigError(f"backend is 'triton', but {TRITON_PROBLEM}; use backend='auto'")
    if backend == "auto":
        return "triton" if runs_triton(device) else "torch"
    return backend


def uses_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype are Triton's; FP64 has PyTorch's, whatever the backend."""
    return resolve_backend(backend, device, dtype) == "triton" and dtype != torch.float64


CPU_KERNELS = NAMES
"""Names of ways to compute experts and exact products on a CPU, the best first: instruction sets, and "torch"."""
lower_cpu_kernels = lower


def cpu_kernels() -> str:
    """Name of the kernels for experts and exact products on this CPU; one of `CPU_KERNELS`. Compiles the kernels if
    need be."""
    return loaded().name


def explain_backends() -> list[BackendReport]:
    """List the backends, whether they work here, and why."""
    on_gpu = torch.cuda.is_available() and runs_triton(torch.device("cuda", 0))
    return [
        _explain_triton(on_gpu),
        _explain_native(),
        BackendReport(
            "torch",
            True,
            f"operators of PyTorch {torch.__version__}; what auto uses {'on the CPU' if on_gpu else 'here'}",
        ),
        BackendReport("reference", True, "plain autograd, the oracle of the tests; slow"),
    ]


def _explain_native() -> BackendReport:
    found = loaded()
    if found.kernels is None:
        return BackendReport("native", False, f"{found.problem}; auto uses torch on the CPU")
    why = (
        f"kernels in C for {found.kernels.instructions.name}; what auto uses for experts and few BF16 rows in "
        "inference, and for batch-invariant products"
    )
    if not found.kernels.has_threads:
        why += "; on one thread, as torch's OpenMP runtime is not found"
    return BackendReport("native", True, f"{why}; {found.problem}" if found.problem else why)


def _explain_triton(on_gpu: bool) -> BackendReport:
    if TRITON_PROBLEM is not None:
        return BackendReport("triton", False, f"{TRITON_PROBLEM}; auto uses torch")
    version = f"Triton {_triton_version() or '(version unknown)'}"
    if on_gpu:
        name = torch.cuda.get_device_name(0)
        return BackendReport("triton", True, f"{version} on {name}; what auto uses on the GPU")
    if torch.cuda.is_available():
        why = f"{version}, but GPU 0 is older than compute capability {OLDEST_NVIDIA_GPU}.0"
        return BackendReport("triton", False, f"{why}; auto uses torch")
    why = f"{version}, but no GPU; on the CPU only its interpreter, for tests, when asked for"
    return BackendReport("triton", False, f"{why}; auto uses torch")
