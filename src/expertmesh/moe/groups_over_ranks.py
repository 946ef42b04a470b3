"""Routing groups whose tokens lie on several processes, with the results of one process.

Tokens stay where they are. Their choices, which are small, are gathered and put in the order of the whole call. Every
process then makes the same decision on all of them and keeps the result for its own tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.moe.capacity import assign, give_kept_the_sum
from expertmesh.moe.types import Routing


class SharedTokens(Protocol):
    """Protocol of processes with equally many tokens of one call, for example
    `expertmesh.parallel.tensor.SharedSequences`."""

    @property
    def rank(self) -> int:
        """Index of this process among those that share the tokens."""

    def gather_tokens(self, x_T: Tensor) -> Tensor:
        """(T, ...) of each process -> (P T, ...) in the order of processes. Gradients of floating-point tensors are
        summed."""


@dataclass(frozen=True)
class SharedGroups:
    """Routing groups of a call whose tokens lie on several processes."""

    shared: SharedTokens  # the processes that share the tokens
    token_index_T: Tensor | None  # global indices of this process's tokens; they order the whole call

    def __post_init__(self) -> None:
        """Raise ConfigError without token indices."""
        if self.token_index_T is None:
            raise ConfigError("shared_tokens without token_index, which says their order; give both")

    @cached_property
    def order_A(self) -> Tensor:  # noqa: N802
        """(A,) position of each token of the whole call among the gathered tokens."""
        assert self.token_index_T is not None
        return self.shared.gather_tokens(self.token_index_T).argsort()

    @cached_property
    def place_T(self) -> Tensor:  # noqa: N802
        """(T,) position of each token of this process in the whole call."""
        assert self.token_index_T is not None
        T = len(self.token_index_T)
        first = T * self.shared.rank
        return self.order_A.argsort()[first : first + T]

    def gather(self, x_T: Tensor) -> Tensor:
        """(T, ...) -> (A, ...), all tokens of the whole call in order."""
        return self.shared.gather_tokens(x_T)[self.order_A]

    def gather_mask(self, mask_T: Tensor | None) -> Tensor | None:
        """(T,) -> (A,) boolean mask of the whole call in order, or None."""
        return None if mask_T is None else self.gather(mask_T.to(torch.uint8)).bool()

    def balanced(self, routed: Routing) -> Routing:
        """Routing of the whole call with the fields that the balance losses read."""
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
    ranked_TK: Tensor | None = None,
    **rest: Any,
) -> Routing:
    """Apply `assign` to the whole call, and return the result for this process's tokens."""
    expert_ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
    assert weights_TK is not None
    scores_TE = routing.scores_TE if policy == "priority" else None
    if scores_TE is not None:  # "priority" reads the largest score only
        scores_TE = groups.gather(scores_TE.detach().amax(-1, keepdim=True))
    everyone = assign(
        Routing(groups.gather(expert_ids_TK), groups.gather(weights_TK.detach()), scores_TE),
        num_experts=num_experts,
        policy=policy,
        renormalize=False,
        token_mask_T=groups.gather_mask(token_mask_T),
        token_index_T=groups.gather(token_index_T),
        ranked_TK=None if ranked_TK is None else groups.gather(ranked_TK),
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
