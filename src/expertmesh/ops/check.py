"""Declarations of tensor arguments, and the check of a call against them. An error is one line: the value, the rule,
the fix.

Values are read on CPUs only, and not inside torch.compile, a trace or a transform (`can_look_at`): elsewhere the host
would have to wait for them, and a compiled graph would break. All other properties are known to the host.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.config import values
from expertmesh.config.values import wrong_type
from expertmesh.errors import ConfigError
from expertmesh.ops.plain_call import can_look_at

WHOLE: tuple[type, ...] = (*values.WHOLE, torch.SymInt)
"""Types of whole numbers; in a graph they are symbols."""
REAL: tuple[type, ...] = (*values.REAL, torch.SymInt, torch.SymFloat)

MOVE = "move one of them with .to()"


class Dtypes(NamedTuple):
    """Valid dtypes of an argument, with their name and the conversion to one of them."""

    words: str
    dtypes: tuple[torch.dtype, ...]
    fix: str = "convert it"


FLOATS = Dtypes("floating-point", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
INTEGERS = Dtypes(
    "an integer type",
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    "convert it with .long()",
)
IDS = Dtypes("int64 or int32", (torch.int64, torch.int32), "convert it with .long()")
BOOL = Dtypes("bool", (torch.bool,), "convert it with .bool()")


class Arg(NamedTuple):
    """Declaration of a tensor argument.

    Attributes:
        shape: one letter of docs/glossary.md for each axis, several shapes with "|" between; "*" stands for any leading
            axes, or for those that the call gives. A letter without a size in the call may be of any size.
    """

    shape: str
    dtypes: Dtypes | None = None  # valid dtypes; None: all
    of: str = ""  # meaning of an entry, for the message
    some: str = ""  # letters whose size must be at least 1
    below: str = ""  # letter of the size that values must be below, from 0 on
    but: int | None = None  # a further valid value
    fix: str = ""  # the fix of a value out of range
    reshape: str = "reshape it"  # the fix of another shape


def check_tensors(
    declared: Mapping[str, Arg],
    given: Mapping[str, Any],
    sizes: Mapping[str, Any],
    *,
    device: torch.device,
) -> None:
    """Check the arguments of a call that are not None; see `check_tensor`."""
    for name, value in given.items():
        if value is not None:
            check_tensor(name, value, declared[name], sizes, device=device)


def check_tensor(
    name: str,  # name of the argument
    value: Any,  # the argument
    arg: Arg,  # its declaration
    sizes: Mapping[str, Any],  # sizes by letter; "*" has a tuple of them
    *,
    device: torch.device | None = None,  # device of the call's other tensors; None: any
) -> None:
    """Raise ConfigError unless a value is a dense tensor as declared."""
    if not isinstance(value, Tensor):
        what = f"a tensor of shape {_words(arg, sizes)}"
        raise wrong_type(name, value, what, "convert it with torch.tensor")
    if value.is_nested or value.layout != torch.strided:
        check_dense(name, value)
    for letters in arg.shape.split("|"):
        if _fits(value.shape, _wanted(letters, sizes), arg.some):
            break
    else:
        raise wrong_shape(name, value, _words(arg, sizes), arg.reshape)
    if arg.dtypes is not None and value.dtype not in arg.dtypes.dtypes:
        raise wrong_dtype(name, value, arg.dtypes.words, arg.dtypes.fix)
    if device is not None and value.device != device:
        check_device(name, value, device)
    if arg.below:
        check_range(name, value, most=sizes[arg.below] - 1, but=arg.but, fix=arg.fix)


def check_device(
    name: str,
    value: Any,
    device: torch.device,
    *,
    of: str = "the other inputs",
    fix: str = MOVE,
) -> None:
    """Raise ConfigError unless a tensor, or whatever has a device, is where `of` (in words) is."""
    if value.device != device:
        raise ConfigError(f"{name} is on {value.device} and {of} on {device}; {fix}")


def check_dense(name: str, value: Tensor) -> None:
    """Raise ConfigError unless a tensor is dense."""
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        fix = "pad it, and give a mask" if value.is_nested else "convert it with .to_dense()"
        raise ConfigError(f"{name} is a {kind} tensor; it must be a dense one; {fix}")


def check_like(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    fix: str = "check the inputs",
) -> None:
    """Raise ConfigError unless a tensor has this very shape and dtype: for operators, of which each call is short."""
    if tuple(tensor.shape) != shape:
        raise wrong_shape(name, tensor, f"{shape} here", fix)
    if dtype is not None and tensor.dtype != dtype:
        autocast = " or use autocast" if dtype.is_floating_point else ""
        raise wrong_dtype(name, tensor, str(dtype), f"convert it{autocast}")


def check_range(name: str, values: Tensor, *, most: int, fix: str, but: int | None = None, note: str = "") -> None:
    """Raise ConfigError unless all values are from 0 to `most`, or `but`; skipped if the host cannot read them."""
    if not can_look_at(values):
        return
    low, high = (int(value) for value in values.aminmax())
    if low >= 0 and high <= most:
        return
    wrong = (values < 0) | (values > most)
    if but is not None:
        wrong &= values != but
        note = f", or {but}"
    if bool(wrong.any()):
        first = int(values[wrong][0])
        check_bounds(name, first, first, most=most, fix=fix, note=note)


def check_bounds(name: str, low: int, high: int, *, most: int, fix: str, note: str = "") -> None:
    """Raise ConfigError unless the smallest and the largest value of a tensor are from 0 to `most`; `note` explains
    it."""
    if not 0 <= low <= high <= most:
        wrong = low if low < 0 else high
        raise ConfigError(f"{name} holds {wrong}; it must be from 0 to {most}{note}; {fix}")


def wrong_shape(name: str, value: Tensor, rule: str, fix: str = "reshape it") -> ConfigError:
    """Error of a tensor of another shape."""
    return ConfigError(f"{name} has shape {tuple(value.shape)}; it must be {rule}; {fix}")


def wrong_dtype(name: str, value: Tensor, rule: str, fix: str = "convert it") -> ConfigError:
    """Error of a tensor of another dtype."""
    return ConfigError(f"{name} has dtype {value.dtype}; it must be {rule}; {fix}")


def _wanted(letters: str, sizes: Mapping[str, Any]) -> list[Any]:
    """Sizes of a shape; a letter where any size is valid."""
    shape: list[Any] = []
    for letter in letters:
        size = sizes.get(letter, letter)
        if letter == "*" and size != "*":
            shape += size
        else:
            shape.append(size)
    return shape


def _fits(shape: tuple[int, ...], wanted: list[Any], some: str) -> bool:
    first = 0
    if wanted and wanted[0] == "*":
        del wanted[0]
        first = max(len(shape) - len(wanted), 0)
    if len(shape) != first + len(wanted):
        return False
    for axis, one in enumerate(wanted, first):
        # no == of shapes and no bool, which torch.compile cannot guard on where a size is a symbol
        if shape[axis] < int(one in some) if isinstance(one, str) else shape[axis] != one:
            return False
    return True


def _words(arg: Arg, sizes: Mapping[str, Any]) -> str:
    texts = []
    for letters in arg.shape.split("|"):
        shape = ["..." if size == "*" else str(size) for size in _wanted(letters, sizes)]
        texts.append(f"({', '.join(shape)}{',' * (len(shape) == 1)})")
    some = "".join(f", {letter} at least 1" for letter in arg.some)
    return f"{' or '.join(dict.fromkeys(texts))}{some}{', ' * bool(arg.of)}{arg.of}"
