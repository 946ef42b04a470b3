"""Uninitialised memory that shows: fresh tensors are filled with NaN, so that an element nobody wrote is noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PATCHED: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)


def fill_with_poison(tensor: Tensor) -> Tensor:
    """Fill in place: NaN for floating and complex dtypes, the largest value for integers, True for bool."""
    if tensor.device.type == "meta" or isinstance(tensor, torch.nn.Parameter):
        return tensor
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return fill_with_poison(allocate(*args, **kwargs))

    return wrapper


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return poisoned tensors.

    Only calls from Python are caught, which is where operators allocate their outputs; not for compiled code.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED]
    own = [name in vars(owner) for owner, name in _PATCHED]
    try:
        for owner, name, original in originals:
            setattr(owner, name, _poisoned(original))
        yield
    finally:
        for (owner, name, original), was_own in zip(originals, own, strict=True):
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
