"""Places of the keys of a step's sequences in the pages of a cache."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Attention = Callable[..., Tensor]
"""Attention of a padded batch, (q_BHSd, k_BHLd, v_BHLd, visible, rule) -> (B, H, S, d), as `OpSet.attention`."""


@dataclass(frozen=True)
class PagedKeys:
    """Pages of the keys of B sequences, and rows of their queries; made once per step, for all layers."""

    starts: Tensor  # (B + 1,) int64 first row of each sequence, and the number of all rows
    # (B,) int64 keys of each sequence, of which the last are its queries' own; 0: its rows are padding
    num_keys_B: Tensor
    table_BN: Tensor  # (B, N) int64 pages of each sequence; entries behind its last page are not read
    most_queries: int | None = None  # maximum number of queries of a sequence, if the host knows it
    # what an implementation keeps for the step's other layers
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
