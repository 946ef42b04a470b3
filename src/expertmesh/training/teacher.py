"""Teacher of a distillation run: another run's model, placed like the student, and initial weights from it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.family import Family
from expertmesh.models.registry import FAMILIES
from expertmesh.models.task import Data, Task
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.runs.precision import Precision
from expertmesh.runs.run_dir import Run, RunDir, find_model
from expertmesh.text.tokenizer import gives_same_tokens

_IN_LAYER = re.compile(r"(layers|encoder|decoder)\.(\d+)\.(.*)")


def open_teacher(
    family: Family,  # family of student and teacher
    task: Task,  # task of the student
    data: Data,  # data of the student
    *,
    precision: Precision,  # precision of the student; see `teacher_dtype`
    ranks: Ranks,  # ranks of the student
    student: nn.Module | None = None,
) -> nn.Module | None:
    """Model of the run in distill.teacher, sharded over the ranks, in evaluation mode; None if distill.teacher is
    unset.

    Args:
        student: set to the teacher's saved weights if distill.init_from_teacher is set; None: no model to set.
    """
    config = task.config
    if config.distill.teacher is None:
        return None
    name = named("distill.teacher", config.distill.teacher)
    if not task.has_lessons:
        raise ConfigError(f"{name}: family {family.name} does not learn from teachers; leave it out")
    run = find_teacher(config, family)
    if run.family.name != family.name:
        raise ConfigError(
            f"{name}: is of family {run.family.name} and this run of {family.name}; name a teacher of the same"
        )
    run.check_whole()
    _check_vocabulary(run, family, config.model, data, name=name)
    placed = run.config.model_copy(update={"parallel": config.parallel})
    opened = open_model(
        replace(run, config=placed),
        device=precision.device,
        dtype=teacher_dtype(precision.compute_dtype),
        ranks=ranks,
        is_placed=True,
    )
    if student is not None and config.distill.init_from_teacher:
        copy_layers(student, opened.model, opened.run.open_weights())
    return opened.model


def find_teacher(config: RunConfig, family: Family) -> Run:
    """Run of distill.teacher, found by its folder. `config`: configuration of the student's run, with a teacher."""
    assert config.distill.teacher is not None
    return find_model(config.distill.teacher, None if family.name in FAMILIES else family)


def teacher_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Dtype of a teacher's weights, except its routers': BF16 if the run computes in BF16, else the student's dtype.

    FP16 is not used: its range is too small for sums over layers, which have the dtype of the weights.
    """
    return compute_dtype if compute_dtype == torch.bfloat16 else accumulate_dtype(compute_dtype)


def teacher_bytes(config: RunConfig, family: Family, *, num_ranks: int, compute_dtype: torch.dtype) -> int:
    """Bytes of the weights of a run's teacher on each rank at rest; 0 without a usable teacher, or if its size is
    unknown."""
    teacher = config.distill.teacher
    if teacher is None or not RunDir(teacher).config.exists():
        return 0
    run = find_teacher(config, family)
    if run.family.name != family.name:
        return 0
    parallel = config.parallel.model_copy(update={"offload": False})
    theirs = run.config.model_copy(update={"parallel": parallel})
    costs = family.costs_of(theirs, num_ranks=num_ranks, dtype="float32")
    if costs is None:
        return 0
    return int(costs.memory.weights_bytes) * teacher_dtype(compute_dtype).itemsize // 4


def _check_vocabulary(run: Run, family: Family, model: object, data: Data, *, name: str) -> None:
    sizes = [getattr(config, "vocab_size", None) for config in (run.config.model, model)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name}: has a vocabulary of {sizes[0]} and {named('model.vocab_size', sizes[1])}; use a teacher of the "
            "same vocabulary"
        )
    for file in family.files:
        mine = data.files.get(file)
        if mine is not None and not gives_same_tokens(Path(mine), run.path / file):
            raise ConfigError(
                f"{name}: has another {file}; use a teacher that was trained on the same data with the same vocabulary"
            )


def copy_layers(student: nn.Module, teacher: nn.Module, weights: TensorSource) -> None:
    """Set a student's weights to its teacher's; each layer is copied from the layer of equal shapes that is nearest in
    depth.

    Balancing biases and hash keys are copied if both models have them.
    """
    mine, theirs = (_shapes(model) for model in (student, teacher))
    my_layers, their_layers = _layers(mine), _layers(theirs)
    depth = {side: max(index for s, index in their_layers if s == side) for side, _ in their_layers}
    sources = {name: name for name in mine if _IN_LAYER.match(name) is None}
    for (side, index), shapes in my_layers.items():
        place = index * depth.get(side, 0) / max(max(i for s, i in my_layers if s == side), 1)
        fitting = [
            (abs(other - place), other) for (s, other), found in their_layers.items() if s == side and found == shapes
        ]
        if not fitting:
            raise ConfigError(
                f"{named('distill.init_from_teacher')}: the teacher has no layer of the shapes of {side}.{index}; "
                "leave it out"
            )
        nearest = min(fitting)[1]
        tensors = [n for n in student.state_dict() if n.startswith(f"{side}.{index}.")]
        sources |= {n: n.replace(f"{side}.{index}.", f"{side}.{nearest}.", 1) for n in tensors}
    targets, saved = student.state_dict(), teacher.state_dict()
    rounds: list[dict[str, Tensor]] = []  # several layers may have one source
    for name, source in sources.items():
        if source not in saved or saved[source].shape != targets[name].shape:
            if name not in mine:
                continue  # a buffer that the teacher does not have
            raise ConfigError(
                f"{named('distill.init_from_teacher')}: the teacher has no {name} of shape {mine[name]}; leave it out"
            )
        fresh = next((one for one in rounds if source not in one), None)
        if fresh is None:
            rounds.append(fresh := {})
        fresh[source] = targets[name]
    for one in rounds:
        read_into(weights, one)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Parameter shapes of each layer, by (side, index) and the rest of the name."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name, shape in shapes.items():
        if match := _IN_LAYER.match(name):
            found.setdefault((match[1], int(match[2])), {})[match[3]] = shape
    return found
