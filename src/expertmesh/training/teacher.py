"""A teacher in the loop: another run's model, placed as the student is, and the student's weights from it."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from expertmesh.config.family import FAMILIES, Family
from expertmesh.errors import ConfigError
from expertmesh.models.family import Data, Task
from expertmesh.parallel.ranks import Ranks
from expertmesh.training.precision import Precision
from expertmesh.training.run_dir import Run, RunDir, load_run
from expertmesh.training.state import load_weights

_IN_LAYER = re.compile(r"(layers|encoder|decoder)\.(\d+)\.(.*)")


def open_teacher(
    family: Family, task: Task, data: Data, *, precision: Precision, ranks: Ranks
) -> nn.Module | None:
    """The model of the run that distill.teacher names, spread over the ranks, in evaluation mode; None: it names none.

    Raises:
        ConfigError: there is no such run, or it is of another family or vocabulary, or the family has no lessons.
        CheckpointError: the run has no usable checkpoint.
    """
    config = task.config
    if config.distill.teacher is None:
        return None
    name = f"distill.teacher={config.distill.teacher}"
    if not task.has_lessons:
        raise ConfigError(
            f"{name}: family {family.name} does not learn from teachers; leave it out"
        )
    named = None if family.name in FAMILIES else family
    _, other = RunDir(config.distill.teacher).read_config(named)
    if other.name != family.name:
        raise ConfigError(
            f"{name}: is of family {other.name} and this run of {family.name}; name a teacher of the same"
        )
    run = load_run(config.distill.teacher, named)
    _check_vocabulary(run, family, config.model, data, name=name)
    theirs: Task = family.open_task(run.config.model_copy(update={"parallel": config.parallel}))
    theirs.check(ranks.size)
    teacher = theirs.place(device=precision.device, dtype=precision.master_dtype, ranks=ranks)
    load_weights(run.checkpoint, teacher)
    return teacher.eval()


def _check_vocabulary(run: Run, family: Family, model: object, data: Data, *, name: str) -> None:
    sizes = [getattr(config, "vocab_size", None) for config in (run.config.model, model)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name}: has a vocabulary of {sizes[0]} and model.vocab_size={sizes[1]}; use a teacher of the same vocabulary"
        )
    for file in family.files:
        mine = data.files.get(file)
        if mine is not None and Path(mine).read_bytes() != (run.path / file).read_bytes():
            raise ConfigError(
                f"{name}: has another {file}; use a teacher that was trained on the same data with the same vocabulary"
            )


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module) -> None:
    """Set a student's weights to its teacher's: of each layer, those of the layer of the same shapes that is nearest in depth.

    Args:
        student: spread over ranks as the teacher is, or not at all.
        teacher: usually of more layers.

    Raises:
        ConfigError: the student has a layer, or a tensor outside the layers, that the teacher has not in this shape.
    """
    mine, theirs = (dict(model.named_parameters()) for model in (student, teacher))
    my_layers, their_layers = _layers(mine), _layers(theirs)
    depth = {side: max(index for s, index in their_layers if s == side) for side, _ in their_layers}
    for (side, index), tensors in my_layers.items():
        place = index * depth.get(side, 0) / max(max(i for s, i in my_layers if s == side), 1)
        fitting = [
            (abs(other - place), other)
            for (s, other), found in their_layers.items()
            if s == side and _shapes(found) == _shapes(tensors)
        ]
        if not fitting:
            raise ConfigError(
                f"distill.init_from_teacher: the teacher has no layer of the shapes of {side}.{index}; leave it out"
            )
        for suffix, source in their_layers[side, min(fitting)[1]].items():
            _copy(tensors[suffix], source)
    for name, tensor in mine.items():
        if _IN_LAYER.match(name) is None:
            if name not in theirs or theirs[name].shape != tensor.shape:
                raise ConfigError(
                    f"distill.init_from_teacher: the teacher has no {name} of shape {tuple(tensor.shape)}; leave it out"
                )
            _copy(tensor, theirs[name])


def _layers(parameters: Mapping[str, Tensor]) -> dict[tuple[str, int], dict[str, Tensor]]:
    """The parameters of each layer by the rest of their names."""
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if match := _IN_LAYER.match(name):
            found.setdefault((match[1], int(match[2])), {})[match[3]] = parameter
    return found


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _copy(target: Tensor, source: Tensor) -> None:
    """Of spread tensors, which lie alike, this rank's parts."""
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in (target, source))
    first, second = parts
    first.copy_(second)
