"""An asynchronous collective with gradients: start and finish are separate, in the backward too.

Computation between the two overlaps with the communication. The backward visits them in the opposite order: finish
starts the gradient's collective, the computation in between runs its backward, and start waits for the gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.comm.group import Pending, wait

Launch = Callable[[Tensor], tuple[Tensor, Pending | None]]
"""Function that starts a collective on a tensor. Returns the result, and the handle to wait for before it may be used
(None: no wait)."""


class _Move:
    """State shared by start and finish: launch functions and the collective in flight."""

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
    """Tensor in an asynchronous collective. Differentiable once."""

    def __init__(
        self,
        x: Tensor,  # the tensor to send
        there: Launch,  # starts the collective
        back: Launch,  # starts the collective of the gradient
        unpack: Callable[[Tensor], Tensor] | None = None,  # converts received data to the result; None: no conversion
    ) -> None:
        self._move = _Move(there, back, unpack or (lambda arrived: arrived))
        # Has the shape of x, because autograd expects a gradient of that shape.
        self._sent: Tensor = _Start.apply(x, self._move)

    def finish(self) -> Tensor:
        """Wait for the collective (on a GPU the host does not wait) and return its result. Call it once."""
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
