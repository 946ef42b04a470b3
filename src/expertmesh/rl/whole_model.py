"""The whole model in this process, for sampling: the trainer's own, or on several ranks a copy of its gathered tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from expertmesh.models.builder import ModelBuilder
from expertmesh.parallel.ranks import Ranks


@contextmanager
def whole_model(model: nn.Module, builder: ModelBuilder, ranks: Ranks) -> Iterator[Any]:
    """A model in evaluation mode whose parameters are all here; freed on exit, unless it is the trainer's own.

    Args:
        model: the placed model.
        builder: its builder.
        ranks: the ranks that share it; all must call, and each holds a copy.
    """
    if ranks.world is None:
        yield model
        return
    first = next(model.parameters())
    whole = builder.place(device=first.device, dtype=first.dtype, ranks=Ranks())
    named = whole.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            gather = getattr(tensor, "full_tensor", None)  # of a DTensor
            named[name].copy_(tensor if gather is None else gather())
    yield whole.eval()
