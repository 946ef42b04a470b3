"""A pytest plugin: whatever would run Triton's kernels on a GPU runs them on the CPU, in Triton's interpreter.

    make test-as-gpu PYTEST_ARGS="tests/engine/test_on_policy.py -k adapters"

"auto" is Triton, the kernels in C are left out, and products of the interpreter are rounded from FP64, so that a row
does not depend on its place in a tile, as on a GPU. Tests that count a CPU's memory or operators fail here; each has
four minutes.
"""

import signal
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import triton.runtime.interpreter as interpreter

from expertmesh.kernels.cpu import library
from expertmesh.ops import backend

_LONGEST_S = 240


class _Numpy:
    """NumPy for the interpreter, with products in FP64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
        """Product of two matrices, rounded once."""
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype or a.dtype)


def _always(device: Any) -> bool:
    return True


def pytest_configure() -> None:
    """Turn every "auto" to Triton."""
    code: CodeType = _always.__code__
    backend.runs_triton.__code__ = code  # of the function itself, since modules import it by name
    interpreter.np = _Numpy()
    library.lower(library.TORCH)


def _end(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"longer than {_LONGEST_S} s in the interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """End a test that takes too long."""
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(_LONGEST_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
