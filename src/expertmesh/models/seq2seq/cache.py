"""What an encoder-decoder keeps while it writes: keys and values of the target so far, and those of the source."""

import torch
from torch import Tensor

from expertmesh.models.cache import KVCache


class Seq2SeqCache(KVCache):
    """A key-value cache with keys and values of the sources, which several rows may share (the beams of a sentence).

    Attributes:
        memory: keys and values of the sources for each decoder layer, (sources, H, S, head_dim) each.
        memory_mask: (sources, 1, 1, S) bool, False for padding; None: there is none.
    """

    memory: list[tuple[Tensor, Tensor]]
    memory_mask: Tensor | None = None

    def branch(self, num_beams: int) -> None:
        """Every row becomes so many neighbouring rows, which share its source.

        Args:
            num_beams: at least 1.
        """
        rows = torch.arange(self.batch_size, device=self._k.device).repeat_interleave(num_beams)
        self.select(rows)

    def reorder(self, rows_R: Tensor) -> None:
        """Row i goes on from what row rows_R[i] was; both are rows of the same source.

        Args:
            rows_R: (rows,) int64.
        """
        self.select(rows_R)
