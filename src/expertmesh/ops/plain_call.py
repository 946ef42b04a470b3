"""When an operator may be called as the Python function it is."""

import torch
from torch import Tensor, nn


def runs_plainly(*tensors: Tensor | None) -> bool:
    """Whether nothing watches a call with these tensors: no compiler, no tracing, no autograd, no other device.

    Every way of a `torch.library` operator through PyTorch's dispatcher costs 20 us with warm caches and several
    times that with cold ones, which is what generating one token at a time has; on a CPU that is as much as an
    expert takes to read.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    given = [t for t in tensors if t is not None]
    if any(type(t) not in (Tensor, nn.Parameter) or t.device.type != "cpu" for t in given):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
