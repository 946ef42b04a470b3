"""Triton's interpreter, usable beside the compiler in one process, with its bugs fixed.

Fixed bugs: conversions to BF16 truncate; dot products of BF16 multiply bit patterns; xor reductions, which tl.sort
uses, loop over elements in Python; a nested jit function leaves triton.language patched; loop bounds fail from NumPy
2.4 on. Arithmetic on BF16 without conversion to FP32 stays wrong, so kernels convert.

Half of its time went into types. Here, values that depend on a shape or a dtype only are cached, and integer sums are
not repeated in 64 bits to check for overflow.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps
from triton.runtime.jit import JITFunction

# The interpreter patches triton.language while it runs, so one launch runs at a time.
_LOCK = threading.Lock()


def interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a kernel on CPU tensors with NumPy, one program after another; slow, for tests and debugging.

    Args:
        kernel: a `@triton.jit` function, made with or without TRITON_INTERPRET.
        options: keyword arguments; unknown ones (num_warps, ...) are ignored.
    """
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    constants = _constant_names(kernel)
    with _LOCK, _interpreted_language():
        run = _rewritten(kernel)
        values = {
            name: value if name in constants else interpreter._implicit_cvt(value) for name, value in values.items()
        }
        size = (*grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*size)
        for index in np.ndindex(*size):
            interpreter.interpreter_builder.set_grid_idx(*index)
            run(**values)


def _constant_names(kernel: Any) -> set[str]:
    hints = kernel.fn.__annotations__
    return {name for name in kernel.arg_names if "constexpr" in str(hints.get(name))}


def _rewritten(kernel: Any) -> Callable[..., Any]:
    return _rewrite(kernel.fn) if isinstance(kernel, JITFunction) else kernel.rewrite()


@cache
def _rewrite(function: Callable[..., Any]) -> Callable[..., Any]:
    return InterpretedFunction(function).rewrite()


def _module_with_language() -> FunctionType:
    """Make a function whose globals are the modules that the interpreter patches."""
    return FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


@contextmanager
def _interpreted_language() -> Iterator[None]:
    """Context in which triton.language computes with NumPy and jit functions can be called; undone on exit."""
    scope = interpreter._patch_lang(_module_with_language())
    # tl.sum, tl.sort and others are jit functions, created when Triton was imported
    for kind in (JITFunction, InterpretedFunction):
        scope.set_attr(kind, "__call__", lambda self, *a, **k: _rewritten(self)(*a, **k))
    scope.set_attr(ReduceOps, "apply_impl", _reduce(ReduceOps.apply_impl))
    scope.set_attr(InterpreterBuilder, "cast_impl", _cast)
    scope.set_attr(InterpreterBuilder, "create_dot", _dot(InterpreterBuilder.create_dot))
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    _find_types_once(scope)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # masked-out lanes overflow and divide by zero
            yield
    finally:
        scope.restore()


# caches by name of a dtype, by name and shape, and by shape; filled while _LOCK is held
_np_dtypes: dict[str, np.dtype[Any]] = {}
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _find_types_once(scope: Any) -> None:
    np_dtype = interpreter._get_np_dtype
    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__

    def np_dtype_of(tt_dtype: Any) -> np.dtype[Any]:
        name = tt_dtype.scalar.name
        if name not in _np_dtypes:
            _np_dtypes[name] = np_dtype(tt_dtype)
        return _np_dtypes[name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        known = _blocks.get((element_ty.name, sizes))
        if known is None:
            new_block(self, element_ty, shape)
            known = _blocks[element_ty.name, sizes] = dict(vars(self))
        vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in _sizes:
            new_tensor(self, handle, type)
            _sizes[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _sizes[sizes]

    builder = interpreter.interpreter_builder
    scope.set_attr(builder, "options", replace(builder.options, sanitize_overflow=False))
    scope.set_attr(interpreter, "_get_np_dtype", np_dtype_of)
    scope.set_attr(tl.block_type, "__init__", block)
    scope.set_attr(tl.tensor, "__init__", tensor)


def _reduce(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, inputs: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return otherwise(self, inputs)
        data = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, inputs[0].dtype)

    return apply_impl


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    data = _from_bf16(src.data) if source == tl.bfloat16 else src.data
    if target == tl.bfloat16:
        data = _to_bf16(data.astype(np.float32))
    else:
        data = data.astype(interpreter._get_np_dtype(dst_type))
    return interpreter.TensorHandle(data, target)


def _dot(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(_from_bf16(handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return otherwise(self, wide(a), wide(b), *rest)

    return create_dot
