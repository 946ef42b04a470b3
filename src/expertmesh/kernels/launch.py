"""Launching kernels: compiled on a GPU, interpreted for CPU tensors."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.interpret import interpret


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its tensors; does not synchronise.

    CPU tensors go through Triton's interpreter, whatever TRITON_INTERPRET was when Triton was imported: kernels are
    interpreted and compiled in the same process, and nothing else in it notices. An empty grid is no launch.

    Args:
        kernel: a `@triton.jit` function.
        grid: up to three numbers of programs.
        args: positional arguments, at least one of them a tensor.
        options: keyword arguments of the kernel, and num_warps, num_stages, ...
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu":
        interpret(kernel, grid, args, options)
        return
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n below 2)."""
    return 1 << max(n - 1, 0).bit_length()
