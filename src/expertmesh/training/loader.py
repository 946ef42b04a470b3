"""Batches by a global sample cursor: sample i is the same window of tokens for any batch size."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """A token array as windows of S tokens and their successors, in a random order per epoch.

    Sample i of a run is window `permutation(epoch)[i % W]` with epoch = i // W, where W is the number of windows. It
    depends on nothing but the seed and i, so the position in the data is one number.

    Attributes:
        tokens_N: (N,) integer tokens.
        seq_len: S.
        seed: of the order.
    """

    tokens_N: np.ndarray
    seq_len: int
    seed: int

    @property
    def num_windows(self) -> int:
        """Windows per epoch; neighbours share one token, and a rest shorter than a window is left out."""
        return (len(self.tokens_N) - 1) // self.seq_len

    def batch(self, first_sample: int, num_samples: int) -> tuple[Tensor, Tensor]:
        """Samples first_sample ... first_sample + num_samples - 1.

        Returns:
            Inputs and targets, each (num_samples, S) int64 on the CPU; targets are inputs shifted by one token.
        """
        return self.windows(
            [self._window_of(i) for i in range(first_sample, first_sample + num_samples)]
        )

    def windows(self, which: list[int]) -> tuple[Tensor, Tensor]:
        """Given windows in their natural order; the same shapes as `batch`."""
        S = self.seq_len
        rows = [self.tokens_N[w * S : w * S + S + 1].astype(np.int64) for w in which]
        ids_BS = torch.from_numpy(np.stack(rows))
        return ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()

    def spread(self, num_samples: int) -> list[int]:
        """At most num_samples windows, evenly spread over the array; all of them if there are fewer."""
        total = self.num_windows
        count = min(num_samples, total)
        return [i * total // count for i in range(count)]

    def _window_of(self, sample: int) -> int:
        epoch, place = divmod(sample, self.num_windows)
        return int(self.permutation(epoch)[place])

    def permutation(self, epoch: int) -> np.ndarray:
        """(W,) the order of the windows in an epoch.

        Sorts the raw numbers of a Philox generator, a stream that NumPy keeps the same in all versions, unlike that of
        its `permutation`.
        """
        return _permutation(self.num_windows, self.seed, epoch)


@lru_cache(maxsize=2)
def _permutation(num_windows: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.Philox(key=seed % 2**64 + (epoch << 64))
    return np.argsort(generator.random_raw(num_windows), kind="stable")
