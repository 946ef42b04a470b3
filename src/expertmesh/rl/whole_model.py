"""The whole model in this process, for sampling: the trainer's own, or on several ranks a copy of its gathered
tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.models.builder import ModelBuilder
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.experts.weights import TENSORS
from expertmesh.parallel.ranks import Ranks


@contextmanager
def whole_model(model: nn.Module, builder: ModelBuilder, ranks: Ranks) -> Iterator[Any]:
    """A model in evaluation mode whose parameters are all here; freed on exit, unless it is the trainer's own.

    Args:
        model: the placed model.
        ranks: the ranks that share it; all must call, and each holds a copy.
    """
    if ranks.world is None:
        yield model
        return
    first = next(model.parameters())
    as_packed = partial(_pack, like=model)
    whole = builder.build_spread(as_packed, device=first.device, dtype=first.dtype, is_read_next=True)
    named = whole.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            gather = getattr(tensor, "full_tensor", None)  # of a DTensor
            named[name].copy_(tensor if gather is None else gather())
    yield whole.eval()


def _pack(model: nn.Module, *, like: nn.Module) -> None:
    """Give experts the format that another model's have, with tensors of all ranks' sizes."""
    for (_, _, own), (_, _, theirs) in zip(grouped_layers(model), grouped_layers(like), strict=True):
        if theirs.format == "dense":
            continue
        room = {
            name: torch.empty(given.shape, dtype=given.dtype, device=own.w_in.device)
            for name in TENSORS
            if (given := getattr(theirs, name)) is not None
        }
        own.hold(theirs.format, room, dtype=theirs.dtype)
