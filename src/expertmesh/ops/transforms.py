"""Checks that refuse `torch.func` transforms, forward-mode differentiation and TorchScript tracing of our operators.

Without them PyTorch would silently give wrong results: a library operator without a forward-mode rule gets a tangent of
exactly zero, and `vmap` runs it in a loop in which an expert's capacity is computed from one sample.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch.autograd import forward_ad

from expertmesh.errors import ConfigError


def refuse_transforms(what: str, tensors: Callable[[], Iterable[Tensor | None]]) -> None:
    """Raise ConfigError inside a transform that would give wrong results. Costs almost nothing outside transforms.

    Args:
        tensors: returns the differentiable inputs; called inside forward-mode differentiation only.
    """
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise ConfigError(
            f"{what} inside torch.jit.trace: its routing depends on the data, a trace does not; use torch.export or "
            "torch.compile"
        )
    stack = get_interpreter_stack() or ()
    if any(level.key() != TransformType.Functionalize for level in stack):
        raise ConfigError(
            f"{what} inside a transform of torch.func (grad, vjp, jvp, jacrev, vmap, ...): would be wrong; use "
            "torch.autograd.grad or"
            " torch.autograd.functional.jacobian, and for vmap a batch"
        )
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors()
    ):
        raise ConfigError(
            f"{what} with tangents: has no forward-mode derivative; use torch.autograd.functional.jvp, which needs none"
        )


def refuse_second_derivative(backward: Any, what: str, *, fix: str) -> None:
    """Make the second derivative of an operator an error, instead of a wrong number."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{what} has no second derivative; {fix}")

    backward.register_autograd(refuse)


def refuse_batched_gradient(what: str, grad: Tensor | None) -> None:
    """Raise ConfigError in a backward over a batch of gradients (`is_grads_batched`, `vectorize`)."""
    if torch.compiler.is_compiling() or grad is None or not is_legacy_batchedtensor(grad):
        return
    raise ConfigError(
        f"{what} of several gradients at once: is not implemented; leave vectorize or is_grads_batched out"
    )
