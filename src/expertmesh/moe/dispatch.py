"""The way out and back: from this process's tokens to the experts' rows and their partial sums home again.

The layer knows only the protocol. Expert parallelism swaps the object; on one process it is the identity.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertParameters


@dataclass(frozen=True)
class Dispatched:
    """Tokens as the experts of this process see them.

    Attributes:
        x_TD: tokens received, in the dtype of the layer's input.
        expert_ids_TK: (T, K) local expert ids in [0, e]; e (the number of local experts) means "no expert here".
        weights_TK: (T, K) routing weights of these slots.
        max_rows: a bound on the live slots that the host knows, or None.
        parameters: of the local experts; None: those that the layer has.
        handle: whatever `combine` needs to send the sums home.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    max_rows: int | None = None
    parameters: ExpertParameters | None = None
    handle: Any = None


class TokenDispatcher(Protocol):
    """Sends tokens to the processes that hold their experts, and partial sums back.

    Every process that shares the experts must call, with any number of tokens, none included.
    """

    def dispatch(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None = None,
        route_degree: int | None = None,
    ) -> Dispatched:
        """Send tokens out.

        Args:
            x_TD: (T, D) tokens of this process.
            expert_ids_TK: (T, K) global expert ids in [0, E]; E means "no expert".
            weights_TK: (T, K) routing weights.
            max_rows: a bound on the live slots of this process (capacity), or None.
            route_degree: processes that a token may travel over in this call; None: the dispatcher's own choice.

        Raises:
            ConfigError: the dispatcher cannot route over so many.
        """
        ...

    def combine(self, y_TD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring one partial sum per received token home; returns (T, D) for the tokens that were sent."""
        ...

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum a tensor over all processes that work on the batch; differentiable once, for a sum of their losses."""
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
        route_degree: int | None = None,
    ) -> Dispatched:
        """Return the arguments as they are."""
        if route_degree not in (None, 1):
            raise ConfigError(
                f"route_degree={route_degree}: this layer is on one process; leave it out, or spread the layer with "
                "expertmesh.parallel"
            )
        return Dispatched(x_TD, expert_ids_TK, weights_TK, max_rows)

    def combine(self, y_TD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return y_TD as it is."""
        return y_TD

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Return the value as it is."""
        return value
