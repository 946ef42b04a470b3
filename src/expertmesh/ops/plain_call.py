"""When an operator may be called as the Python function it is."""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is one of Python on CPU tensors: no compiler, no tracing, no subclass."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    for t in tensors:
        if t is not None and (type(t) not in (Tensor, nn.Parameter) or not t.is_cpu):
            return False
    return True


def runs_plainly(*tensors: Tensor | None) -> bool:
    """Whether nothing watches a call with these tensors: no compiler, no tracing, no autograd, no mode, no other device.

    Every way of a `torch.library` operator through PyTorch's dispatcher costs 20 us with warm caches and several
    times that with cold ones, which is what generating one token at a time has; on a CPU that is as much as an
    expert takes to read.
    """
    if not is_plain(*tensors) or is_in_torch_dispatch_mode():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
