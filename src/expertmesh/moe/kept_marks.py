"""Attributes such as `allreduce`, classes and gradient hooks that parameters keep where torch makes others of them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor, nn

_HOOK = "expertmesh_hook"
Marks = dict[str, tuple[type, dict[str, Any]]]
"""Class and attributes of parameters, by name."""


def hook_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor]) -> None:
    """Register a gradient hook on a parameter of a `KeptMarks`, and on parameters that take its place."""
    setattr(parameter, _HOOK, hook)
    if parameter.is_floating_point():
        learns = parameter.requires_grad  # torch refuses hooks of frozen ones, which may learn later
        parameter.requires_grad_(True).register_hook(hook)
        parameter.requires_grad_(learns)


def _marks(module: nn.Module) -> Marks:
    return {name: (type(p), dict(vars(p))) for name, p in module.named_parameters()}


def _mark(module: nn.Module, marks: Marks, *, are_new: bool = False) -> None:
    """Give the module's parameters what they have not; new ones have no hook."""
    for name, parameter in module.named_parameters():
        kind, attributes = marks.get(name, (Tensor, {}))
        if type(parameter) is nn.Parameter and issubclass(kind, nn.Parameter):
            parameter.__class__ = kind
        missing = attributes.keys() - vars(parameter).keys()
        for key in missing:
            setattr(parameter, key, attributes[key])
        if _HOOK in (attributes if are_new else missing):
            hook_gradient(parameter, attributes[_HOOK])


@contextmanager
def kept_marks(module: nn.Module) -> Iterator[None]:
    """Keep what the module's parameters have while they may be replaced."""
    marks = _marks(module)
    yield
    _mark(module, marks)


def _mark_loaded(module: nn.Module, _: Any) -> None:
    _mark(module, vars(module).pop("_marks_before"))


class KeptMarks(nn.Module):
    """Module whose parameters keep their attributes in deep copies, when they move to another device, and where a state
    dict replaces them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Build the module."""
        super().__init__(*args, **options)
        self.register_load_state_dict_post_hook(_mark_loaded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the parameters' attributes."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__reduce_ex__(2)[2], memo))
        _mark(made, _marks(self), are_new=True)
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        with kept_marks(self):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        vars(self)["_marks_before"] = _marks(self)
        super()._load_from_state_dict(*args)
