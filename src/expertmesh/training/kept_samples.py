"""Samples of `train.sample_every`: who may write them, and where they are kept."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.models.task import Data, Task
from expertmesh.runs.precision import Precision

Sampler = Callable[[Task, nn.Module, Data, Precision], Sequence[Mapping[str, Any]]]
"""Writes samples of a model in training: (task, model, data, precision) -> for each sample its "prompt" and "text"."""


def check_samples(config: RunConfig, family: Family, sampler: Sampler | None, *, num_ranks: int) -> None:
    """Raise ConfigError if `train.sample_every` is set and nobody can write samples."""
    every = config.train.sample_every
    if every is None:
        return
    name = "train.sample_every"
    if not family.generates_text:
        raise ConfigError(name, every, f"family {family.name} writes no text", "leave it out")
    if sampler is None:
        raise ConfigError(name, every, "needs a sampler", "pass training_samples as sampler")
    if num_ranks > 1:
        why = f"needs the whole model in one process, and there are {num_ranks}"
        raise ConfigError(name, every, why, "leave it out, and use generate on the checkpoints")


def kept_samples(found: Sequence[Mapping[str, Any]], path: Path, *, step: int) -> Iterator[str]:
    """Append samples to the file of a run; yields a line about each."""
    with path.open("a", encoding="utf-8") as file:
        for one in found:
            file.write(json.dumps({"step": step, **one}, ensure_ascii=False) + "\n")
            yield f"step {step} wrote: {one['prompt'][-60:]!r} -> {one['text']!r}"
