"""Cache of weights prepared for products: widened, padded, or packed in oneDNN's order.

Otherwise a product prepares its weight in every call, which takes longer than the product of a single row. A caller
whose weights do not change, such as the engine, enables the cache while it computes. It changes no bits.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor


class Keepable(Protocol):
    """Protocol of a prepared weight."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the prepared weight holds beside the weight itself."""


Made = TypeVar("Made", bound=Keepable)


class Kept:
    """Cache of prepared weights by parameter; an entry is prepared again after its parameter has changed.

    Call `clear` after changes that autograd's version counter does not see, such as writes to `p.data`.

    Args:
        parameters: the parameters whose prepared weights may be cached; other tensors may change unnoticed.
        most_bytes: upper bound on cached bytes for parts of parameters, such as single experts; whole parameters are
            always cached.
    """

    def __init__(self, parameters: Iterable[Tensor], *, most_bytes: int) -> None:
        self._owners = {p.data_ptr(): p for p in parameters if not p.is_inference()}
        self._made: dict[tuple[int, int | None], tuple[int, Tensor | None, object]] = {}
        self._most_bytes = self._left = most_bytes

    def get(
        self,
        w: Tensor,
        bias: Tensor | None,
        make: Callable[[bool], Made],
        *,
        part: int | None = None,
    ) -> Made:
        """Return the prepared weight from the cache, or make it.

        Args:
            w: the parameter; other tensors and views of other shapes are not cached.
            bias: the bias parameter that belongs to it, or None.
            make: makes the prepared weight; its argument tells whether it will be cached.
            part: index of the part of w; None: all of w.
        """
        at = w.data_ptr()
        version = self._version(w, at)
        if version is not None and bias is not None:
            of_bias = self._version(bias, bias.data_ptr())
            version = None if of_bias is None else version + of_bias
        if version is None:
            return make(False)
        found = self._made.get((at, part))
        if found is not None and found[0] == version and found[1] is bias:
            return found[2]  # type: ignore[return-value]
        if part is not None and found is None and self._left <= 0:
            return make(False)
        made = make(True)
        if part is not None and found is None:
            self._left -= made.num_bytes
        self._made[at, part] = version, bias, made
        return made

    def clear(self) -> None:
        """Drop all entries."""
        self._made.clear()
        self._left = self._most_bytes

    def _version(self, t: Tensor, at: int) -> int | None:
        """Version counter of a cached parameter; None for other tensors."""
        owner = self._owners.get(at)
        if owner is None or owner.data_ptr() != at or owner.shape != t.shape:
            return None
        return owner._version


_now: ContextVar[Kept | None] = ContextVar("kept weights", default=None)


def kept_now() -> Kept | None:
    """Return the active cache of prepared weights, or None."""
    return _now.get()


@contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Activate a cache of prepared weights inside the context."""
    token = _now.set(kept)
    try:
        yield
    finally:
        _now.reset(token)
