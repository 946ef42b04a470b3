"""Scores of answers under the reference of preferences: computed once, when a run begins, and kept in its folder."""

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from expertmesh.config.output_file import complete
from expertmesh.data.data_progress import Progress
from expertmesh.data.pair_data import PairData
from expertmesh.errors import ConfigError
from expertmesh.models.task import Batch, Part, Task, each_tensor, micro_batches, named_tensors
from expertmesh.parallel.ranks import Ranks

FILE = "reference.npz"
"""Name of the file in a run directory."""

Score = Callable[[Batch, Part], Tensor]
"""Log-probabilities (P, 2) of the pairs of a batch, sample by sample."""


def score_pairs(task: Task, score: Score, data: PairData, *, device: torch.device, ranks: Ranks) -> dict[str, Tensor]:
    """Scores (N, 2) of all pairs by split, FP64 on the CPU.

    Training pairs are scored in the order, the micro-batches and the arithmetic of training's first epoch, and
    validation pairs as evaluations take them, so that a model that has not changed has the same bits.
    """
    train = task.config.train
    size, B = train.samples_per_pass, train.batch_size
    passes = {
        "training": (data.batch(first, B) for first in range(0, data.num_training, B)),
        "validation": (batch for most in (train.eval_batches * B, None) for batch in data.validation(most, size)),
    }
    counts = {side: data.num_pairs(side) for side in passes}
    found, progress = (
        {},
        Progress("scored by the reference:", total=sum(counts.values()), unit="pairs"),
    )
    for side, batches in passes.items():
        count = counts[side]
        scores_N2 = torch.zeros(count, 2, dtype=torch.float64)
        seen_N = torch.zeros(count, dtype=torch.bool)
        with torch.set_grad_enabled(side == "training"):
            for batch in progress.over(_new(batches, seen_N), _num_pairs):
                for rows, mine in micro_batches(task, batch, size, ranks):
                    part = Part(0, rows, ranks, task.progress_items(mine))
                    place_P = places_of(mine)
                    on_device = each_tensor(mine, lambda t: t.to(device))
                    new_P = ~seen_N[place_P]
                    found_P2 = score(on_device, part).detach().to(scores_N2)
                    scores_N2[place_P[new_P]] = found_P2[new_P]
                seen_N[places_of(batch)] = True
        summed = ranks.sum_((scores_N2 * ranks.counted).to(ranks.device), what="the reference's scores")
        found[side] = summed.to(scores_N2.device)
    return found


def _new(batches: Iterator[Batch], seen_N: Tensor) -> Iterator[Batch]:
    """The batches with a pair that is not scored yet."""
    return (batch for batch in batches if not seen_N[places_of(batch)].all())


def places_of(batch: Batch) -> Tensor:
    """Indices (P,) of the pairs in a batch, sample by sample."""
    place_BK = named_tensors(batch)["place"]
    return place_BK[place_BK >= 0]


def _num_pairs(batch: Batch) -> int:
    return len(places_of(batch))


def write_scores(folder: Path, scores: dict[str, Tensor]) -> None:
    """Write scores to a run directory."""
    with complete(folder / FILE) as partial:
        sides: dict[str, Any] = {side: scores_N2.numpy() for side, scores_N2 in scores.items()}
        np.savez(partial, **sides)


def read_scores(folder: Path, data: PairData) -> dict[str, Tensor]:
    """Scores of a run directory."""
    path = folder / FILE
    wanted = {side: data.num_pairs(side) for side in ("training", "validation")}
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
            found = {side: torch.from_numpy(file[side]) for side in wanted}
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ConfigError(
            f"{path}: the reference's scores cannot be read ({error}); restore the file, or begin the run anew"
        ) from None
    if any(found[side].shape != (count, 2) for side, count in wanted.items()):
        raise ConfigError(f"{path}: holds scores of other data; restore it, or begin the run anew")
    return found
