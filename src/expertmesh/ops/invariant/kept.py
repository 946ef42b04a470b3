"""Weights as products want them, kept from call to call: wider, filled up, or in oneDNN's order.

A product brings its weight into that form in every call, which with one row takes longer than the product. Who knows that weights
stay, as an engine does, lets them be kept while it computes. Bits are those of products that keep nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor


class Keepable(Protocol):
    """What is made of a weight."""

    @property
    def num_bytes(self) -> int:
        """That it holds beside the weight."""


Made = TypeVar("Made", bound=Keepable)


class Kept:
    """What has been made of parameters; made anew once one has changed.

    A change that autograd's versions do not count, as one by `p.data`, has to be followed by `clear`.

    Args:
        parameters: of which something may be kept; other tensors are memory that anything may happen to.
        most_bytes: of what is kept of parts of parameters, as experts are; of whole ones everything is kept.
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
        """What `make` gives, from the last time where nothing has changed since.

        Args:
            w: the parameter. Of other tensors, and of views of other shapes, nothing is kept.
            bias: the parameter that is in it, too.
            make: makes it; is told whether it will be kept.
            part: which part of w it is made of; None: the whole.
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
        """Forget all of it."""
        self._made.clear()
        self._left = self._most_bytes

    def _version(self, t: Tensor, at: int) -> int | None:
        """How often a parameter has changed; None: this is none of them."""
        owner = self._owners.get(at)
        if owner is None or owner.data_ptr() != at or owner.shape != t.shape:
            return None
        return owner._version


_now: ContextVar[Kept | None] = ContextVar("kept weights", default=None)


def kept_now() -> Kept | None:
    """What products may keep weights in; None: in nothing."""
    return _now.get()


@contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Let products keep weights meanwhile."""
    token = _now.set(kept)
    try:
        yield
    finally:
        _now.reset(token)
