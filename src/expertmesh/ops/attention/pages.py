"""Places of the keys of a step's sequences in the pages of a cache."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

Attention = Callable[..., Tensor]
"""Attention of a padded batch, (q_BHSd, k_BHLd, v_BHLd, visible, rule) -> (B, H, S, d), as `OpSet.attention`."""


@dataclass(frozen=True)
class PagedKeys:
    """Pages of the keys of B sequences, and rows of their queries; made once per step, for all layers.

    Attributes:
        starts: (B + 1,) int64 first row of each sequence, and the number of all rows.
        num_keys_B: (B,) int64 keys of each sequence, of which the last are its queries' own; 0: its rows are padding.
        table_BN: (B, N) int64 pages of each sequence; entries behind its last page are not read.
        most_queries: maximum number of queries of a sequence, if the host knows it.
        memo: what an implementation keeps for the step's other layers.
    """

    starts: Tensor
    num_keys_B: Tensor
    table_BN: Tensor
    most_queries: int | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def parted(
        self, fewest_queries: int, fewest_keys: int
    ) -> tuple["PagedKeys | None", "PagedKeys | None"]:
        """Sequences with fewer queries or keys, and the others, or None; to each the rows of the other are padding."""
        name = fewest_queries, fewest_keys
        if self.most_queries is not None and self.most_queries < fewest_queries:
            return self, None
        if name not in self.memo:
            is_long_B = (self.starts.diff() >= fewest_queries) & (self.num_keys_B >= fewest_keys)
            num_long = int(is_long_B.sum())
            few, many = (
                replace(self, num_keys_B=self.num_keys_B.masked_fill(hidden, 0), memo={})
                for hidden in (is_long_B, ~is_long_B)
            )
            self.memo[name] = (
                None if num_long == len(is_long_B) else few,
                many if num_long else None,
            )
        found: tuple[PagedKeys | None, PagedKeys | None] = self.memo[name]
        return found
