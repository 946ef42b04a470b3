"""Routing groups shared over processes that have parts of the same sequences: treated as in one process.

Tokens stay where they are. Their choices, small beside them, are gathered, put in the order of the whole call, and decided on by
every process alike, which then keeps what is said of its own tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.moe.assignment import assign, give_kept_the_sum
from expertmesh.moe.types import Routing


class SharedTokens(Protocol):
    """Processes with equally many tokens of one call; `expertmesh.parallel.tensor.SharedSequences` is one."""

    @property
    def rank(self) -> int:
        """This process's place among them."""

    def gather_tokens(self, x_T: Tensor) -> Tensor:
        """(T, ...) of each -> (P T, ...) of all, in their order; the gradient of a floating type comes back summed."""


@dataclass(frozen=True)
class SharedGroups:
    """The routing groups of a call whose tokens several processes share.

    Attributes:
        shared: the processes that share the tokens.
        token_index_T: global indices of this process's tokens, whose order is that of the whole call.

    Raises:
        ConfigError: there are no indices.
    """

    shared: SharedTokens
    token_index_T: Tensor | None

    def __post_init__(self) -> None:
        """Refuse a call without an order."""
        if self.token_index_T is None:
            raise ConfigError(
                "shared_tokens without token_index, which says their order; give both"
            )

    @cached_property
    def order_A(self) -> Tensor:  # noqa: N802
        """Where each token of the whole call lies among the gathered ones."""
        assert self.token_index_T is not None
        return self.shared.gather_tokens(self.token_index_T).argsort()

    @cached_property
    def place_T(self) -> Tensor:  # noqa: N802
        """Place of this process's tokens in the whole call."""
        assert self.token_index_T is not None
        T = len(self.token_index_T)
        first = T * self.shared.rank
        return self.order_A.argsort()[first : first + T]

    def gather(self, x_T: Tensor) -> Tensor:
        """(T, ...) -> (A, ...), all tokens of the whole call in order."""
        return self.shared.gather_tokens(x_T)[self.order_A]

    def gather_mask(self, mask_T: Tensor | None) -> Tensor | None:
        """The same for booleans, if there are any."""
        return None if mask_T is None else self.gather(mask_T.to(torch.uint8)).bool()

    def balanced(self, routed: Routing) -> Routing:
        """What the balance losses use of a routing, of the whole call."""
        scores_TE, load_TE = routed.scores_TE, routed.load_TE
        return replace(
            routed,
            expert_ids_TK=self.gather(routed.expert_ids_TK),
            scores_TE=None if scores_TE is None else self.gather(scores_TE),
            load_TE=None if load_TE is None else self.gather(load_TE),
        )


def assign_shared(
    routing: Routing,
    *,
    groups: SharedGroups,
    num_experts: int,
    policy: str,
    renormalize: bool,
    token_mask_T: Tensor | None,
    token_index_T: Tensor,
    **rest: Any,
) -> Routing:
    """`assign` over the whole call; the result is that of this process's tokens."""
    expert_ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
    assert weights_TK is not None
    scores_TE = routing.scores_TE if policy == "priority" else None
    if scores_TE is not None:  # the largest alone counts
        scores_TE = groups.gather(scores_TE.detach().amax(-1, keepdim=True))
    everyone = assign(
        Routing(groups.gather(expert_ids_TK), groups.gather(weights_TK.detach()), scores_TE),
        num_experts=num_experts,
        policy=policy,
        renormalize=False,
        token_mask_T=groups.gather_mask(token_mask_T),
        token_index_T=groups.gather(token_index_T),
        **rest,
    )
    ids_TK = everyone.expert_ids_TK[groups.place_T]
    live_TK, kept_TK = expert_ids_TK < num_experts, ids_TK < num_experts
    if renormalize:
        weights_TK = give_kept_the_sum(weights_TK, live_TK, kept_TK)
    return replace(
        routing,
        expert_ids_TK=ids_TK,
        weights_TK=weights_TK,
        num_dropped=(live_TK & ~kept_TK).sum(),
        max_rows=everyone.max_rows,
    )
