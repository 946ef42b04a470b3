"""Calls of a function of CPU tensors, recorded once and repeated on the same memory: no Python between kernels, no
allocation, no view.

Operators are seen by a dispatch mode, kernels in C by their notes. Operators whose results never change (views, empty
memory, constants) are not repeated; the others write where they wrote. What the host reads would be fixed, so that a
function that reads is refused.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.noted import NO_MEMORY, NotedCall, noting

_aten = torch.ops.aten
_EMPTY = frozenset({_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided})
_CONSTANT = frozenset({_aten.new_zeros, _aten.zeros_like, _aten.new_ones, _aten.ones_like, _aten.new_full})
"""Operators of a tensor whose results do not depend on its values."""
_CASTS = frozenset({_aten._to_copy, _aten.clone})
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READERS = frozenset(
    getattr(Tensor, name)
    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__dlpack__")
)
_DIRECT: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.lt.Scalar: torch.lt,
    _aten.clamp.default: torch.clamp,
    _aten.clamp_min.default: torch.clamp_min,
    _aten.bitwise_not.default: torch.bitwise_not,
    _aten.gather.default: torch.gather,
    _aten.topk.default: torch.topk,
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten.index_copy_.default: Tensor.index_copy_,
}
"""Functions that cost half of their operator's call, with the same arguments."""


class UnrecordableError(Exception):
    """A function that cannot be recorded; says why in one line."""


class Recording:
    """Calls of a function, to be repeated.

    Example:
        >>> x = torch.ones(3)
        >>> recording = Recording()
        >>> y = recording.record(lambda: (x + 1) * 2)
        >>> _ = x.fill_(4)
        >>> recording.replay()
        >>> y
        tensor([10., 10., 10.])
    """

    def __init__(self) -> None:
        self._noted: list[Any] = []
        self._calls: list[tuple[Callable[[], Any], bool]] = []  # calls, and whether they are of kernels in C
        self._kept: list[NotedCall] = []  # with structs and tensors; the other calls hold their own
        self.num_bytes = 0  # memory that the recording keeps

    def record(self, function: Callable[[], Any]) -> Any:
        """Run a function; returns its results, which every replay overwrites.

        Raises:
            UnrecordableError: it reads values of tensors.
        """
        with _Readers(), _Operators(self._noted), noting(self._noted.append):
            results = function()
        self._finish()
        return results

    def replay(self) -> None:
        """Repeat the calls."""
        for call, is_kernel in self._calls:
            result = call()
            if is_kernel and result:
                message = "a kernel met expert ids out of range; check the router"
                raise MemoryError("no memory for the rows of a kernel") if result == NO_MEMORY else ConfigError(message)

    def _finish(self) -> None:
        """Calls that change between replays, of all that were noted."""
        operators = [one for one in self._noted if isinstance(one, _Operator)]
        written = {at for one in operators for at in one.written}
        known: set[int] = set()  # memory that is allocated here
        constant: set[int] = set()
        for one in self._noted:
            if isinstance(one, NotedCall):
                self._kept.append(one)
                self._calls.append((partial(one.function, one.address), True))
                continue
            own = [(t, _memory(t)) for t in one.results if t.numel()]
            new = {at for _, at in own} - {_memory(t) for t in one.given} - known
            self.num_bytes += sum(t.untyped_storage().nbytes() for t, at in own if at in new)
            known |= new
            packet = one.operator.overloadpacket
            if packet in _EMPTY or not (new or one.written):
                continue
            is_constant = packet in _CONSTANT or all(_memory(t) in constant for t in one.given)
            is_constant = is_constant and torch.Tag.nondeterministic_seeded not in one.operator.tags
            if is_constant and not new & written and not one.written:
                constant |= new
                continue
            self._calls.append((one.again(), False))
        self._noted = []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


class _Operator:
    """A call of an operator with its results."""

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        self.operator, self.args, self.kwargs = operator, args, kwargs
        self.results = _tensors_in(results)
        self.given = [t for t in _tensors_in((args, kwargs)) if t.numel()]
        arguments = operator._schema.arguments
        named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        # memory of arguments that it writes
        self.written = {
            _memory(tensor)
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors_in(named.get(argument.name))
        }

    def again(self) -> Callable[[], Any]:
        """The call, with results where they are."""
        operator, args, kwargs = self.operator, self.args, self.kwargs
        direct = _DIRECT.get(operator)
        if self.written:
            return partial(direct or operator, *args, **kwargs)
        if operator.overloadpacket in _CASTS:
            return partial(self.results[0].copy_, args[0])
        if direct is not None:
            return partial(direct, *args, **kwargs, out=self.results[0] if len(self.results) == 1 else self.results)
        if (into := _into(operator)) is not None:
            names = [argument.name for argument in into._schema.arguments if argument.is_out]
            return partial(into, *args, **kwargs, **dict(zip(names, self.results, strict=True)))
        return self._copied

    def _copied(self) -> None:
        for old, new in zip(self.results, _tensors_in(self.operator(*self.args, **self.kwargs)), strict=True):
            old.copy_(new)


def _into(operator: Any) -> Any:
    """The operator that writes its results where they are asked for; None: there is none."""
    own = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    for name in operator.overloadpacket.overloads():
        other = getattr(operator.overloadpacket, name)
        arguments = other._schema.arguments
        given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        results = len(operator._schema.returns)
        if len(arguments) - len(given) == results and given == own:
            return other
    return None


def _reads(operator: Any, given: list[Tensor]) -> bool:
    """Whether an operator that may read values does so: indices of numbers have a known size."""
    if operator.overloadpacket is not _aten.index:
        return True
    return any(one.dtype in (torch.bool, torch.uint8) for one in given[1:])


class _Operators(TorchDispatchMode):
    """Notes operators."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if _READING & set(func.tags) and _reads(func, _tensors_in((args, given))):
            raise UnrecordableError(f"the host reads a tensor by {func}")
        with noting(None):
            results = func(*args, **given)
        self._noted.append(_Operator(func, args, given, results))
        return results


class _Readers(TorchFunctionMode):
    """Refuses reads that no operator shows."""

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READERS:
            raise UnrecordableError(f"the host reads a tensor by {func.__name__}")
        return func(*args, **(kwargs or {}))
