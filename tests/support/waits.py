"""Where the host would wait for a GPU, found without one: tensors on "meta" have no values, as if the host did not know
them yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_WAITING = frozenset(
    {
        _aten._local_scalar_dense,
        _aten._unique2,
        _aten.bincount,
        _aten.equal,
        _aten.masked_select,
        _aten.nonzero,
        _aten.unique_dim,
    }
)
"""Operators whose result, or its size, the host must know."""


class Waits(TorchDispatchMode):
    """Takes tensors on "meta" for a GPU's, and notes the operators at which the host would wait for it.

    These are values and sizes that the host asks for, and copies from or to memory that is not pinned, as
    `torch.tensor` makes them of numbers, too.

    Attributes:
        found: their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in given) and _waits(func.overloadpacket, given, kwargs):
            self.found.append(str(func))
        result = func(*args, **kwargs)
        both = [*given, *(t for t in tree_leaves(result) if isinstance(t, Tensor))]
        # a number on the host goes along with a launch
        if given and len({t.is_meta for t in both if t.dim() or len(given) == 1}) > 1:
            self.found.append(str(func))
        return result


def _waits(operator: Any, given: list[Tensor], kwargs: dict[str, Any]) -> bool:
    if operator is _aten.repeat_interleave:
        return kwargs.get("output_size") is None and given[0].dtype in (torch.int32, torch.int64)
    if operator is _aten.index:
        return any(t.dtype == torch.bool for t in given[1:])
    return operator in _WAITING


class _Made(TorchFunctionMode):
    """Notes tensors that are made of the host's numbers: on "meta" no operator shows it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        is_made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if is_made and result.is_meta:
            self._found.append(func.__name__)
        return result


@contextmanager
def waits() -> Iterator[Waits]:
    """Inside, waits are noted."""
    watch = Waits()
    with _Made(watch.found), watch:
        yield watch
