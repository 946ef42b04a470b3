"""A collective between its start and its finish, for autograd as well.

What runs between the two hides the travel. In the backward autograd visits them in the opposite order: the finish sends
the gradient off, what ran in between takes its turn, and the start waits for what has come back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.comm.group import Pending, wait

Launch = Callable[[Tensor], tuple[Tensor, Pending | None]]
"""Starts a collective on a tensor: gives the result, and what to wait for before it may be used (None: nothing)."""


class _Move:
    """What a start leaves for its finish, and in the backward the other way round."""

    def __init__(self, there: Launch, back: Launch, unpack: Callable[[Tensor], Tensor]) -> None:
        self.there, self.back, self.unpack = there, back, unpack
        self._under_way: tuple[Tensor, Pending | None] | None = None

    def start(self, launch: Launch, x: Tensor) -> Tensor:
        self._under_way = launch(x)
        return self._under_way[0]

    def wait(self) -> Tensor:
        assert self._under_way is not None, "finished twice"
        (out, pending), self._under_way = self._under_way, None
        wait(pending)
        return out


class AsyncTensor:
    """One tensor in a collective. Differentiable once.

    Args:
        x: what is sent.
        there: starts the collective.
        back: starts the collective that takes the gradient back.
        unpack: makes the result of what arrived, where it travelled in another form; None: it did not.
    """

    def __init__(
        self,
        x: Tensor,
        there: Launch,
        back: Launch,
        unpack: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._move = _Move(there, back, unpack or (lambda arrived: arrived))
        # Of the shape of x, so that the gradient under way has the shape that autograd expects.
        self._sent: Tensor = _Start.apply(x, self._move)

    def finish(self) -> Tensor:
        """Wait for it (on a GPU the host does not wait); gives the result. To be called once.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        out: Tensor = _Finish.apply(self._sent, self._move)
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: _Move) -> Tensor:
        ctx.move = move
        move.start(move.there, x)
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, move: _Move) -> Tensor:
        ctx.move = move
        return move.unpack(move.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.start(ctx.move.back, grad), None
