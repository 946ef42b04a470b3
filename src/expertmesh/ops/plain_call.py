"""Operators of our own on the CPU, and checks that allow them to be called as their plain Python functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad

from expertmesh.kernels.cpu.noted import is_noting

_LIBRARY = torch.library.Library("expertmesh", "FRAGMENT")


def cpu_operator(
    schema: str,  # name, arguments and results, as `torch.library.Library.define` reads them
    run: Callable[..., Any],
    fake: Callable[..., Any],  # function that returns results without values
    *,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,  # what saves tensors for `backward`
) -> Any:
    """Register a function of CPU tensors as an operator; without gradients a call costs a tenth of `custom_op`'s.

    Args:
        backward: gradients, see `torch.library.register_autograd`; None: not seen by autograd.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"expertmesh::{name}", fake, lib=_LIBRARY)
    if backward is None:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    else:
        torch.library.register_autograd(f"expertmesh::{name}", backward, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.expertmesh, name).default


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is plain Python on CPU tensors: no compiler, no tracing, no subclass."""
    # `is_compiling` is one flag for all threads, and a step may be traced while this thread computes
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
        return False
    for t in tensors:  # noqa: SIM110 (a generator takes as long as the whole check)
        if t is not None and (type(t) not in (Tensor, nn.Parameter) or not t.is_cpu):
            return False
    return True


def _is_direct(*tensors: Tensor | None) -> bool:
    """Whether nothing stands between a call with these tensors and their memory: plain, no dispatch mode, no
    transform."""
    if not is_plain(*tensors):  # first: a compiler breaks at what is below
        return False
    # the length of this thread's stack: what `torch.utils._python_dispatch` says is of all threads; a recorder of steps
    # is one mode, which leaves calls plain
    return torch._C._len_torch_dispatch_stack() == is_noting() and not get_interpreter_stack()


def can_look_at(tensor: Tensor) -> bool:
    """Whether the host can read the values of a tensor without a device synchronisation or a graph break."""
    return _is_direct(tensor) and tensor.numel() > 0 and not is_noting()


def runs_plainly(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors needs no dispatch and reads their memory as it is: CPU, no compiler, no
    autograd, no mode.

    A `torch.library` operator costs 20 us in PyTorch's dispatcher with warm caches, and several times as much with cold
    ones, as in token-by-token generation. On a CPU that is as long as reading an expert takes.
    """
    if not _is_direct(*tensors):
        return False
    if forward_ad._current_level >= 0 or any(t is not None and t.is_neg() for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
