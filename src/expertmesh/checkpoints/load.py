"""Weights of a model from a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.manifest import find_damage
from expertmesh.checkpoints.source import read_into
from expertmesh.errors import CheckpointError


def load_weights(path: Path, model: nn.Module | Mapping[str, Tensor]) -> None:
    """Set the weights of a model from a checkpoint; for inference.

    Args:
        path: the checkpoint's folder.
        model: the model of the same configuration, or some of its tensors by name.

    Raises:
        CheckpointError: damaged, or of another model.
    """
    problem = find_damage(path)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {path}: is damaged ({problem}); delete it to use the one before"
        )
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    read_into(Checkpoint(path, prefix="model."), tensors)
