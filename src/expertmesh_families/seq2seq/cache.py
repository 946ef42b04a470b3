"""Cache of an encoder-decoder: keys and values of target tokens and of sources."""

import torch
from torch import Tensor

from expertmesh.models.cache import KVCache


class Seq2SeqCache(KVCache):
    """A key-value cache of target tokens, with keys and values of sources, which several rows may share (beams)."""

    # keys and values of the sources for each decoder layer, (sources, H, S, head_dim) each
    memory: list[tuple[Tensor, Tensor]]
    memory_mask: Tensor | None = None  # (sources, 1, 1, S) bool, False for padding; None: there is none

    def branch(self, num_beams: int) -> None:
        """Repeat every row num_beams times, as neighbouring rows that share its source."""
        rows = torch.arange(self.batch_size, device=self._k.device).repeat_interleave(num_beams)
        self.select(rows)

    def reorder(self, rows_R: Tensor) -> None:
        """Replace row i by the old row rows_R[i], a row of the same source. `rows_R`: (rows,) int64 row indices."""
        self.select(rows_R)
