"""Windows of tokens by global sample number: sample i is the same window for any batch size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expertmesh.data.order import shuffled, spread_batches


@dataclass(frozen=True)
class Windows:
    """Windows of S tokens and their targets from a token array, in a random order per epoch (`data/order.py`)."""

    tokens_N: np.ndarray  # (N,) integer tokens
    seq_len: int  # tokens of a window, S
    seed: int  # seed of the order

    @property
    def num_windows(self) -> int:
        """Number of windows per epoch; neighbours share one token, and a remainder is left out."""
        return (len(self.tokens_N) - 1) // self.seq_len

    def batch(self, first_sample: int, num_samples: int) -> tuple[Tensor, Tensor]:
        """Samples first_sample ... first_sample + num_samples - 1.

        Returns:
            Inputs and targets, each (num_samples, S) int64 on the CPU; targets are inputs shifted by one token.
        """
        return self.windows(shuffled(first_sample, num_samples, total=self.num_windows, seed=self.seed))

    def batches(self, max_samples: int | None, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of at most max_samples windows (None: all), evenly spaced over the array."""
        return map(self.windows, spread_batches(self.num_windows, max_samples, batch_size))

    def windows(self, which: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the windows with these indices, in the shapes of `batch`."""
        S = self.seq_len
        rows = [self.tokens_N[w * S : w * S + S + 1].astype(np.int64) for w in which]
        ids_BS = torch.from_numpy(np.stack(rows))
        return ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()
