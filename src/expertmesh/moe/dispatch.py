"""The way out and back: from this process's tokens to the experts' rows and their partial sums home again.

The layer knows only the protocol. Expert parallelism swaps the object; on one process it is the identity.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Dispatched:
    """Tokens as the experts of this process see them.

    Attributes:
        x_TD: tokens received, in the dtype of the layer's input.
        expert_ids_TK: (T, K) local expert ids in [0, e]; e (the number of local experts) means "no expert here".
        weights_TK: (T, K) routing weights of these slots.
        max_rows: a bound on the live slots that depends on sizes only, or None.
        handle: whatever `combine` needs to send the sums home.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    max_rows: int | None = None
    handle: Any = None


class TokenDispatcher(Protocol):
    """Sends tokens to the processes that hold their experts, and partial sums back."""

    def dispatch(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None = None,
    ) -> Dispatched:
        """Send tokens out.

        Args:
            x_TD: (T, D) tokens of this process.
            expert_ids_TK: (T, K) global expert ids in [0, E]; E means "no expert".
            weights_TK: (T, K) routing weights.
            max_rows: a bound on the live slots of this process (capacity), or None.
        """
        ...

    def combine(self, y_TD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring one partial sum per received token home; returns (T, D) for the tokens that were sent."""
        ...


class LocalDispatcher:
    """All experts are here: the identity. Never synchronises."""

    def dispatch(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None = None,
    ) -> Dispatched:
        """Return the arguments as they are."""
        return Dispatched(x_TD, expert_ids_TK, weights_TK, max_rows)

    def combine(self, y_TD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return y_TD as it is."""
        return y_TD
