"""Capacity: which of the chosen (token, expert) slots stay, per routing group."""

import math
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from expertmesh.config.moe_rules import LayerOptions
from expertmesh.moe.routing_noise import STREAM_RANDOM_DROP, random_bits
from expertmesh.moe.types import Routing
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.check import check_range
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.route_metadata import (
    MOST_TRITON_EXPERTS,
    NO_EXPERT,
    check_expert_ids,
    route_metadata,
)

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)

_LARGEST_DENOMINATOR = 10**6

Ratio = tuple[int, int]
"""Numerator and denominator."""


def choice_factor(options: LayerOptions, factor: float | None, *, training: bool) -> Ratio:
    """Capacity factor of expert-choice routing: 1 if none is given; `max_capacity_factor` bounds it in both cases."""
    if options.router != "expert_choice":
        return 1, 1  # only expert choice uses it
    given = _given(options, factor, training) or 1.0
    return exact_ratio(smaller_factor(given, options.max_capacity_factor) or given)


def drop_factor(options: LayerOptions, factor: float | None, *, training: bool) -> Ratio | None:
    """Capacity factor by which choices are dropped in a call, or None if the call is dropless. All processes get the
    same. Expert-choice routing gets None: it applies its capacity while it chooses."""
    in_force = smaller_factor(_given(options, factor, training), options.max_capacity_factor)
    if options.router == "expert_choice" or in_force is None:
        return None
    return exact_ratio(in_force)


def drop_policy(options: LayerOptions, *, training: bool) -> str:
    """Drop policy in force: "first", "priority", "weight" or "random"; "random" is "first" in evaluation."""
    policy = options.drop_policy
    return "first" if policy == "random" and not training else policy


def _given(options: LayerOptions, factor: float | None, training: bool) -> float | None:
    if factor is None:
        factor = options.capacity_factor if training else options.eval_capacity_factor
    return smaller_factor(factor, None)


def smaller_factor(factor: float | None, max_factor: float | None) -> float | None:
    """The smaller of two capacity factors; None and inf mean dropless."""
    given = [f for f in (factor, max_factor) if f is not None and f != math.inf]
    return min(given) if given else None


def exact_ratio(factor: float) -> Ratio:
    """A capacity factor as the simplest fraction near it: 1.1 is 11/10.

    With fractions the capacity is integer arithmetic, equal on host and device; in floating point ceil(10 * 1.1) is 12.
    Computed by continued fractions in plain arithmetic, which torch.compile can trace.
    """
    rest, (p0, q0), (p1, q1) = factor, (0, 1), (1, 0)
    while True:
        whole = int(rest)
        p2, q2 = whole * p1 + p0, whole * q1 + q0
        if q2 > _LARGEST_DENOMINATOR:
            return p1, q1
        p0, q0, p1, q1 = p1, q1, p2, q2
        if abs(p1 / q1 - factor) <= factor * 1e-15:
            return p1, q1
        rest = 1.0 / (rest - whole)


def capacity_of(
    num_tokens: IntOrTensor, top_k: int, num_experts: int, factor: Ratio, *, min_capacity: int
) -> IntOrTensor:
    """C = max(min_capacity, ceil(K * T_g / E * factor)), for a number or a tensor of numbers of tokens."""
    share, divisor = top_k * factor[0], num_experts * factor[1]
    if isinstance(num_tokens, Tensor):
        return ((num_tokens * share + (divisor - 1)) // divisor).clamp(min=min_capacity)
    # not torch.sym_max, which torch 2.11 does not trace for plain numbers; it becomes that where num_tokens is symbolic
    return max(min_capacity, (num_tokens * share + (divisor - 1)) // divisor)


def group_sizes(num_tokens: int, group_size: int | None) -> tuple[int, int]:
    """(number of routing groups, tokens in each but the last); the last one holds the rest."""
    if group_size is None or num_tokens <= group_size:
        return 1, num_tokens
    return -(-num_tokens // group_size), group_size


def valid_tokens_per_group(
    num_tokens: int, group_size: int | None, token_mask_T: Tensor | None, device: torch.device
) -> Tensor:
    """(number of groups,) int64: unmasked tokens in each routing group. Does not synchronise."""
    num_groups, size = group_sizes(num_tokens, group_size)
    tail = num_tokens - (num_groups - 1) * size
    if token_mask_T is None:
        if num_groups == 1:
            return torch.full((1,), num_tokens, device=device)
        last = torch.arange(num_groups, device=device) == num_groups - 1
        return torch.where(last, tail, size)
    padded = torch.nn.functional.pad(token_mask_T, (0, size - tail))
    return padded.view(num_groups, size).sum(1)


def count_choices(expert_ids_TK: Tensor, num_experts: int, group_size: int | None) -> Tensor:
    """(number of groups, E) int64, slots that chose each expert; ids equal to E count nowhere.

    Raises ConfigError if ids are no (T, K) integers, or (on CPUs only) out of range.

    Example:
        >>> count_choices(torch.tensor([[0, 1], [0, 2]]), 2, None).tolist()  # 2 is "no expert"
        [[2, 1]]
    """
    check_expert_ids(expert_ids_TK)
    # an id out of range would count in the next group
    fix = "check the router"
    check_range("expert_ids", expert_ids_TK, most=num_experts, fix=fix, note=NO_EXPERT)
    T = expert_ids_TK.shape[0]
    num_groups, size = group_sizes(T, group_size)
    segment_TK = expert_ids_TK
    if num_groups > 1:
        group_T = torch.arange(T, device=expert_ids_TK.device) // size
        segment_TK = segment_TK + group_T[:, None] * (num_experts + 1)
    counts = _count(segment_TK.reshape(-1), num_groups * (num_experts + 1))
    return counts.view(num_groups, num_experts + 1)[:, :num_experts]


def count_all_choices(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """(E,) int64, slots of all tokens that chose each expert."""
    return _count(expert_ids_TK.reshape(-1), num_experts + 1)[:num_experts]


def _count(values_N: Tensor, end: int) -> Tensor:
    """(end,) int64, how often each number from 0 to end - 1 occurs."""
    if runs_plainly(values_N):  # one call instead of three; on a GPU it would synchronise
        return torch.bincount(values_N, minlength=end)
    backend = resolve_backend("auto", values_N.device, torch.float32)
    if backend == "triton" and end <= MOST_TRITON_EXPERTS:
        # atomic adds to few addresses would serialise
        return route_metadata(values_N[:, None], end).offsets_E.diff().to(torch.int64)
    counts = values_N.new_zeros(end)
    return counts.scatter_add(0, values_N, torch.ones_like(values_N))


def _queue_order(
    weights_TK: Tensor,
    live_TK: Tensor,
    policy: str,
    noise_key: Tensor,
    token_index_T: Tensor,
    layer_index: int,
    priority_T: Tensor | None,
) -> Tensor | None:
    """(K * T,) order in which slots queue for their experts, as indices j * T + t; None: 0, 1, 2, ..."""
    if policy == "first":
        return None
    if policy == "priority":
        if priority_T is None:
            priority_T = weights_TK.detach().masked_fill(~live_TK, -math.inf).amax(-1)
        return priority_order(priority_T, weights_TK.shape[1])
    if policy == "weight":
        keys = -weights_TK.detach()
    else:
        keys = random_bits(
            noise_key,
            token_index_T,
            weights_TK.shape[1],
            layer_index=layer_index,
            stream=STREAM_RANDOM_DROP,
        )
    return torch.sort(keys.t().reshape(-1), stable=True).indices


def priority_order(priority_T: Tensor, top_k: int) -> Tensor:
    """(K * T,) slots j * T + t: all first choices by descending priority of the tokens, then all second choices, ..."""
    token_T = torch.sort(-priority_T, stable=True).indices
    first_slot_K = torch.arange(top_k, device=priority_T.device) * priority_T.shape[0]
    return (first_slot_K[:, None] + token_T).reshape(-1)


def queue_positions(segment_N: Tensor, order_N: Tensor | None, num_segments: int) -> Tensor:
    """Position of each slot in the queue of its segment, counted from 0.

    Args:
        segment_N: (N,) int64 index of each slot's queue.
        order_N: (N,) int64 slots in order of arrival; None: 0, 1, 2, ...

    Returns:
        (N,) int64. Linear in N but for the stable sort of small integers; no (N, segments) one-hot.
    """
    arrived = segment_N if order_N is None else segment_N[order_N]
    sorted_N, by_segment = torch.sort(arrived.to(torch.int32), stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(num_segments, dtype=torch.int32, device=segment_N.device))
    rows = torch.arange(segment_N.shape[0], device=segment_N.device)
    rank_sorted = rows - starts[sorted_N]
    slot_sorted = by_segment if order_N is None else order_N[by_segment]
    return torch.empty_like(rank_sorted).scatter(0, slot_sorted, rank_sorted)


def assign(
    routing: Routing,  # the choices; ids equal to E are not live. Scores are read by "priority" only.
    *,
    num_experts: int,  # E
    factor: Ratio,  # capacity factor, exact
    min_capacity: int,  # least rows per expert and routing group
    policy: str,  # first, priority, weight or random
    group_size: int | None,  # tokens per routing group; None: all tokens of the call
    renormalize: bool,  # scale the weights of a token's kept slots to the sum of the weights of all its live slots
    token_mask_T: Tensor | None,  # (T,) True for real tokens, or None
    noise_key: Tensor,  # (2,) int64, for "random"
    token_index_T: Tensor,  # (T,) int64, for "random"
    layer_index: int,  # for "random"
    ranked_TK: Tensor | None = None,  # (T, K), which "weight" ranks; None: the weights
) -> Routing:
    """Drop the rows of each expert and routing group that exceed C = max(min_capacity, ceil(K * T_g / E * factor)).

    T_g is the number of unmasked tokens of the group, a tensor. Buffer sizes come from the static number of tokens, so
    nothing synchronises with the host. `policy` says which rows are kept:

    * first: all first choices in token order, then all second choices, ... (GShard).
    * priority: like first, with tokens in descending order of their largest score, or of their largest routing weight
      if the router gives no scores (batch-prioritised routing, V-MoE, arXiv 2106.05974, algorithm 2).
    * weight: choices in descending order of routing weight, before division where that is over kept ones (DeepSpeed's
      `probs`).
    * random: uniform over the queue (DeepSpeed's Random Token Selection).

    Ties are in the order of "first".

    Returns:
        The routing with id E at dropped slots, num_dropped, and max_rows, a static bound on the kept rows.
    """
    expert_ids_TK, weights_TK = routing.expert_ids_TK, routing.weights_TK
    assert weights_TK is not None
    T, K = expert_ids_TK.shape
    if T == 0:
        zero = torch.zeros((), dtype=torch.int64, device=expert_ids_TK.device)
        return replace(routing, num_dropped=zero)
    num_groups, size = group_sizes(T, group_size)
    valid_U = valid_tokens_per_group(T, group_size, token_mask_T, expert_ids_TK.device)
    capacity_U = capacity_of(valid_U, K, num_experts, factor, min_capacity=min_capacity)
    group_T = torch.arange(T, device=expert_ids_TK.device) // size
    segment_TK = expert_ids_TK + group_T[:, None] * (num_experts + 1)
    live_TK = expert_ids_TK < num_experts
    # the token's largest score over all experts, before weights are normalised
    scores_TE = routing.scores_TE if policy == "priority" else None
    priority_T = None if scores_TE is None else scores_TE.detach().amax(-1)
    ranked_TK = weights_TK if ranked_TK is None else ranked_TK
    order = _queue_order(ranked_TK, live_TK, policy, noise_key, token_index_T, layer_index, priority_T)
    position_KT = queue_positions(segment_TK.t().reshape(-1), order, num_groups * (num_experts + 1)).view(K, T)
    kept_TK = live_TK & (position_KT.t() < capacity_U[group_T][:, None])
    if renormalize:
        weights_TK = give_kept_the_sum(weights_TK, live_TK, kept_TK)
    tail = T - (num_groups - 1) * size
    max_rows = num_experts * (
        (num_groups - 1) * capacity_of(size, K, num_experts, factor, min_capacity=min_capacity)
        + capacity_of(tail, K, num_experts, factor, min_capacity=min_capacity)
    )
    return replace(
        routing,
        expert_ids_TK=torch.where(kept_TK, expert_ids_TK, num_experts),
        weights_TK=weights_TK,
        num_dropped=(live_TK & ~kept_TK).sum(),
        max_rows=max_rows,
    )


def give_kept_the_sum(weights_TK: Tensor, live_TK: Tensor, kept_TK: Tensor) -> Tensor:
    """Scale the weights of each token's kept slots to the sum of the weights of all its live slots."""
    tiny = torch.finfo(weights_TK.dtype).tiny
    total = weights_TK.masked_fill(~live_TK, 0).sum(-1, keepdim=True)
    kept = weights_TK.masked_fill(~kept_TK, 0)
    return kept / kept.sum(-1, keepdim=True).clamp_min(tiny) * total
