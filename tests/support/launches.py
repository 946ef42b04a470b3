"""What the host side of the kernels would launch on a GPU that is not here: recorded, then compiled ahead of time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from expertmesh.kernels import tiles
from tests.support.aot import Build, build

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_ALIGNMENT = 16


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: numbers of programs.
        values: positional and keyword arguments of the kernel by name.
        options: num_warps, num_stages, ...
    """

    kernel: Any
    grid: tuple[int, ...]
    values: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel without its leading underscore."""
        return str(self.kernel.__name__).lstrip("_")

    @property
    def key(self) -> str:
        """Equal for launches that Triton compiles once for a target."""
        return repr((self.name, *self._compiled_for(), sorted(self.options.items())))

    def build(self, target: str) -> Build:
        """Compile as Triton would for these arguments: types, constants, which numbers are multiples of 16."""
        types, constants, unaligned = self._compiled_for()
        return build(
            self.kernel,
            target,
            types,
            constants,
            unaligned=frozenset(unaligned),
            **self.options,
        )

    def _compiled_for(self) -> tuple[dict[str, str], dict[str, Any], list[str]]:
        constexprs = {p.name for p in self.kernel.params if p.is_constexpr}
        plain = {p.name for p in self.kernel.params if p.do_not_specialize}
        types, constants, unaligned = {}, {}, []
        for name, value in self.values.items():
            is_one = isinstance(value, int) and value == 1 and name not in plain
            if name in constexprs or value is None or is_one:
                constants[name] = value
                continue
            types[name] = _type_name(value)
            # a number's size, or where a tensor lies: on "meta" at its offset into its storage
            place = value.data_ptr() if isinstance(value, Tensor) else value
            if name not in plain and isinstance(place, int) and place % _ALIGNMENT:
                unaligned.append(name)
        return types, constants, unaligned


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextmanager
def as_on(target: str, *, num_multiprocessors: int = 132) -> Iterator[None]:
    """Inside, plans are those for a GPU of this kind, whatever the device."""
    with (
        mock.patch.object(tiles, "architecture", lambda device: target),
        mock.patch.object(tiles, "multiprocessors", lambda device: num_multiprocessors),
    ):
        yield


@contextmanager
def recorded_launches(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Inside, nothing runs: what these kernel modules launch is appended to the list. Use tensors on "meta"."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False))
        values |= {name: value for name, value in options.items() if name in names}
        rest = {name: value for name, value in options.items() if name not in names}
        launches.append(Launch(kernel, grid, values, rest))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", record))
        yield launches
