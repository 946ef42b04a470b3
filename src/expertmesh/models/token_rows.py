"""Rows of some tokens of an embedding or an output matrix, which learn while the matrix rests."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.moe.learning import learn_as


class OwnRows(NamedTuple):
    """Rows that stand in the place of a matrix's."""

    ids_N: Tensor  # (N,) int64 tokens, ascending
    rows_ND: Tensor  # (N, D)


class TokenRows(nn.Module):
    """Rows of some tokens, which stand in the place of a matrix's. Parameter: `rows` (N, D)."""

    def __init__(self, ids: Sequence[int], width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        learn_as(self, "table")
        self.ids = tuple(ids)
        self._ids_N = torch.empty(0)  # on the device of the rows, once they have one
        self.rows = nn.Parameter(torch.empty(len(ids), width, device=device, dtype=dtype))

    def forward(self) -> OwnRows:
        """The tokens and their rows."""
        if not len(self._ids_N) or self._ids_N.device != self.rows.device:
            with torch.inference_mode(False):
                self._ids_N = torch.tensor(self.ids, device=self.rows.device)
        return OwnRows(self._ids_N, self.rows)


def embedded_with(own: OwnRows, x: Tensor, ids: Tensor) -> Tensor:
    """Embedded tokens (..., D) of ids (...), some of which have rows of their own."""
    at = torch.searchsorted(own.ids_N, ids).clamp(max=len(own.ids_N) - 1)
    rows = F.embedding(at, own.rows_ND).to(x.dtype)
    return torch.where((own.ids_N[at] == ids)[..., None], rows, x)


def put_logits(logits: Tensor, own: OwnRows, x: Tensor, linear: Callable[..., Tensor]) -> Tensor:
    """Logits (..., V) of hidden states x (..., D), in place, by the rows that some tokens have of their own."""
    return logits.index_copy_(-1, own.ids_N, linear(x, own.rows_ND.to(x.dtype)))
