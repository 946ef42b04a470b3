"""Attributes of parameters, such as `allreduce`, that torch drops where it makes other parameters of them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import nn


def _mark(module: nn.Module, marks: dict[str, dict[str, Any]]) -> None:
    """Set the attributes that the module's parameters have not, by the name of the parameter."""
    for name, parameter in module.named_parameters():
        for key, value in marks.get(name, {}).items():
            if key not in parameter.__dict__:
                setattr(parameter, key, value)


def _marks(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(parameter.__dict__) for name, parameter in module.named_parameters()}


@contextmanager
def kept_marks(module: nn.Module) -> Iterator[None]:
    """Keep the attributes of the module's parameters while they may be replaced."""
    marks = _marks(module)
    yield
    _mark(module, marks)


class KeptMarks(nn.Module):
    """Module whose parameters keep their attributes in deep copies, and when they move to another device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the parameters' attributes."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__reduce_ex__(2)[2], memo))
        _mark(made, _marks(self))
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        with kept_marks(self):
            super()._apply(fn, recurse)
        return self
