"""The order in which training samples are used: a fixed shuffle for each epoch, found by a global sample number."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np


def shuffled(first_sample: int, num_samples: int, *, total: int, seed: int) -> list[int]:
    """Which of `total` samples a run's samples first_sample ... first_sample + num_samples - 1 are.

    Sample i of a run is `permutation(epoch)[i % total]` with epoch = i // total. It depends on nothing but the seed and i, so
    the position in the data is one number.
    """
    found = []
    for sample in range(first_sample, first_sample + num_samples):
        epoch, place = divmod(sample, total)
        found.append(int(permutation(total, seed, epoch)[place]))
    return found


def evenly_spaced(total: int, max_samples: int | None) -> list[int]:
    """At most so many (None: all) of `total` samples, evenly spread, in their natural order."""
    count = total if max_samples is None else min(max_samples, total)
    return [i * total // count for i in range(count)]


def spread_batches(total: int, max_samples: int | None, batch_size: int) -> Iterator[list[int]]:
    """The samples of `evenly_spaced` in lists of this length; the last may be shorter."""
    chosen = evenly_spaced(total, max_samples)
    return (chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size))


@lru_cache(maxsize=2)
def permutation(total: int, seed: int, epoch: int) -> np.ndarray:
    """(total,) the order of an epoch.

    Sorts the raw numbers of a Philox generator, a stream that NumPy keeps the same in all versions, unlike that of
    its `permutation`.
    """
    generator = np.random.Philox(key=seed % 2**64 + (epoch << 64))
    return np.argsort(generator.random_raw(total), kind="stable")
