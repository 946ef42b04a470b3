"""Launch of kernels: compiled on a GPU, interpreted for CPU tensors."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.interpret import interpret


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its tensors; does not synchronise.

    CPU tensors use Triton's interpreter, whatever TRITON_INTERPRET was when Triton was imported. Kernels are
    interpreted and compiled in the same process without side effects on other code. An empty grid launches nothing.
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu":
        interpret(kernel, grid, args, options)
        return
    # Triton launches on the current device, which may differ from the tensors'.
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n (1 for n below 2)."""
    return 1 << max(n - 1, 0).bit_length()
