"""Order of training samples: a fixed permutation per epoch, indexed by a global sample number."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np


def shuffled(first_sample: int, num_samples: int, *, total: int, seed: int) -> list[int]:
    """Indices, below `total`, of a run's samples first_sample ... first_sample + num_samples - 1.

    Sample i of a run is `permutation(epoch)[i % total]` with epoch = i // total. It depends on the seed and i only, so
    the position in the data is one number.
    """
    found = []
    for sample in range(first_sample, first_sample + num_samples):
        epoch, place = divmod(sample, total)
        found.append(int(permutation(total, seed, epoch)[place]))
    return found


def evenly_spaced(total: int, max_samples: int | None) -> list[int]:
    """Indices of at most max_samples (None: all) of `total` samples, evenly spaced, ascending."""
    count = total if max_samples is None else min(max_samples, total)
    return [i * total // count for i in range(count)]


def spread_batches(total: int, max_samples: int | None, batch_size: int) -> Iterator[list[int]]:
    """The indices of `evenly_spaced` in lists of `batch_size`; the last may be shorter."""
    chosen = evenly_spaced(total, max_samples)
    return (chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size))


@lru_cache(maxsize=2)
def permutation(total: int, seed: int, epoch: int) -> np.ndarray:
    """(total,) int64, the permutation of an epoch.

    Sorts raw numbers of a Philox generator, which are the same in all versions of NumPy, unlike the results of its
    `permutation`.
    """
    generator = np.random.Philox(key=seed % 2**64 + (epoch << 64))
    return np.argsort(generator.random_raw(total), kind="stable")
