"""Launching kernels: compiled on a GPU, interpreted for CPU tensors."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

# The interpreter replaces functions of triton.language while it runs: one launch at a time.
_INTERPRETER_LOCK = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its tensors; does not synchronise.

    CPU tensors go through Triton's interpreter (NumPy, one program after another: for tests and debugging), whatever
    TRITON_INTERPRET was when Triton was imported. So kernels are interpreted and compiled in the same process, and
    nothing else in it notices. An empty grid is no launch.

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
        _interpret(kernel, grid, args, options)
        return
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n below 2)."""
    return 1 << max(n - 1, 0).bit_length()


def _interpret(kernel: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> None:
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    constants = _constant_names(kernel)
    with _INTERPRETER_LOCK, _interpreted_language():
        run = _rewritten(kernel)
        values = {
            name: value if name in constants else interpreter._implicit_cvt(value)
            for name, value in values.items()
        }
        size = (*grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*size)
        for index in np.ndindex(*size):
            interpreter.interpreter_builder.set_grid_idx(*index)
            run(**values)


def _constant_names(kernel: Any) -> set[str]:
    hints = kernel.fn.__annotations__
    return {name for name in kernel.arg_names if "constexpr" in str(hints.get(name))}


def _rewritten(kernel: Any) -> Any:
    if isinstance(kernel, JITFunction):
        return interpreter.InterpretedFunction(kernel.fn).rewrite()
    return kernel.rewrite()


def _module_with_language() -> FunctionType:
    """A function whose globals are the modules that the interpreter is to patch."""
    return FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


def _reduce(otherwise: Any) -> Any:
    """NumPy's xor where the interpreter loops over elements in Python; tl.sort has one per step."""

    def apply_impl(self: Any, inputs: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return otherwise(self, inputs)
        data = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, inputs[0].dtype)

    return apply_impl


@contextmanager
def _interpreted_language() -> Iterator[None]:
    """Inside, triton.language computes with NumPy and `@triton.jit` functions can be called; undone at the end."""
    scope = interpreter._patch_lang(_module_with_language())
    # tl.sum, tl.sort and the like are jit functions themselves, made when Triton was imported
    scope.set_attr(JITFunction, "__call__", lambda self, *a, **k: _rewritten(self)(*a, **k))
    scope.set_attr(
        interpreter.InterpretedFunction,
        "__call__",
        lambda self, *a, **k: self.rewrite()(*a, **k),
    )
    scope.set_attr(interpreter.ReduceOps, "apply_impl", _reduce(interpreter.ReduceOps.apply_impl))
    # item() because NumPy 2.4 does not take arrays of one element for integers any more
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # masked-out lanes overflow and divide by zero
            yield
    finally:
        scope.restore()
