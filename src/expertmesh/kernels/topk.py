"""Fused top-k: scores, choice and routing weights of every token in one pass over its logits, and the gradient in
another.

The forward reads 4 * T * E bytes of logits, and writes 12 * T * K bytes and 4 * T * E bytes of scores. Plain PyTorch
needs about ten kernels with as many (T, E) intermediates. The choice packs an order-preserving integer of the criterion
and the complement of the expert id into one 64-bit key, so a partial sort of the keys gives the K best with ties going
to the lower expert id; NaN counts as largest, as in torch.topk. The backward needs only logits and ids.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import launch, next_power_of_2

MAX_EXPERTS = 2048
_PROGRAM_LANES = 1024
_FEW_PROGRAMS = 256
_LANES_PER_WARP = 256
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class SelectionRule:
    """Options of the choice, with the meanings of `expertmesh.config.moe_rules.LayerOptions`."""

    score_function: str
    normalize: bool
    weight_scale: float = 1.0
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    num_group_scores: int = 2


@triton.jit
def _softmax(x):
    """Compute softmax along the last axis; lanes of -inf give 0, and so does a row of -inf only."""
    largest = tl.max(x, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    e = tl.exp(x - largest[:, None])
    return tl.div_rn(e, tl.maximum(tl.sum(e, 1), _TINY)[:, None])


@triton.jit
def _scores(x, real, FUNCTION: tl.constexpr):
    """Compute scores over all experts; 0 in lanes without an expert."""
    if FUNCTION == "sigmoid":
        return tl.where(real, tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x)), 0.0)
    return _softmax(tl.where(real, x, float("-inf")))


@triton.jit
def _ordered(x):
    """Map floats to int32 with the same order: -0.0 equals 0.0, NaN is above everything."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FC00000, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(x, real, lane, LANES: tl.constexpr):
    """Make unique int64 keys: by value, then by lower lane; lanes that are not real come last."""
    value = tl.where(real, _ordered(x), -(2**31)).to(tl.int64)
    return (value << 32) | (LANES - 1 - lane).to(tl.int64)[None, :]


@triton.jit
def _allow_groups(
    criterion,
    real,
    LIMIT: tl.constexpr,
    BEST: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    """Mask of lanes in the LIMIT groups with the largest sum of their BEST (1 or 2) best criteria; ties to the lower
    group."""
    BLOCK_T: tl.constexpr = criterion.shape[0]
    grouped = tl.reshape(tl.where(real, criterion, float("-inf")), (BLOCK_T, G, S))
    exists = tl.reshape(real, (BLOCK_T, G, S))
    strength = tl.max(grouped, 2)
    if BEST == 2:
        place = tl.argmax(grouped, 2)
        others = exists & (tl.arange(0, S)[None, None, :] != place[:, :, None])
        second = tl.max(tl.where(others, grouped, float("-inf")), 2)
        # a group of one expert has no second best
        strength = tl.where(tl.max(others.to(tl.int32), 2) > 0, strength + second, strength)
    group = tl.arange(0, G)
    keys = _keys(strength, (group < GROUPS)[None, :], group, G)
    rank = tl.sum((keys[:, None, :] > keys[:, :, None]).to(tl.int32), 2)
    allowed = (rank < LIMIT)[:, :, None] & exists
    return tl.reshape(allowed, (BLOCK_T, G * S))


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(
    logits_ptr,
    noise_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scores_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    FUNCTION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMIT: tl.constexpr,
    BEST: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    LANES: tl.constexpr = G * S
    SIZE: tl.constexpr = E // GROUPS
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, LANES)
    expert = lane // S * SIZE + lane % S
    is_expert = (lane % S < SIZE) & (lane // S < GROUPS)
    real = (t < num_tokens)[:, None] & is_expert[None, :]
    index = t[:, None] * E + expert[None, :]
    logits = tl.load(logits_ptr + index, mask=real, other=0.0)
    scores = _scores(logits, real, FUNCTION)

    criterion = logits
    if noise_ptr is not None:
        criterion += tl.load(noise_ptr + index, mask=real, other=0.0)
    if bias_ptr is not None or GROUPS > 1:
        if FUNCTION != "softmax_after_topk":
            criterion = scores if noise_ptr is None else _scores(criterion, real, FUNCTION)
        if bias_ptr is not None:
            criterion += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
        if GROUPS > 1:
            allowed = _allow_groups(criterion, real, LIMIT, BEST, GROUPS, G, S)
            criterion = tl.where(allowed, criterion, float("-inf"))
    keys = tl.topk(_keys(criterion, real, lane, LANES), COLUMNS)

    column = tl.arange(0, COLUMNS)
    chosen_lane = LANES - 1 - (keys & 0x7FFFFFFF).to(tl.int32)
    chosen = chosen_lane // S * SIZE + chosen_lane % S
    is_choice = (column < K)[None, :] & (t < num_tokens)[:, None]
    if FUNCTION == "softmax_after_topk":
        at_choice = tl.gather(logits, chosen_lane, 1)
        weights = _softmax(tl.where(is_choice, at_choice, float("-inf")))
    else:
        weights = tl.where(is_choice, tl.gather(scores, chosen_lane, 1), 0.0)
        if NORMALIZE:
            weights = tl.div_rn(weights, tl.maximum(tl.sum(weights, 1), _TINY)[:, None])
    place = t[:, None] * K + column[None, :]
    tl.store(ids_ptr + place, chosen.to(tl.int64), mask=is_choice)
    tl.store(weights_ptr + place, weights * scale, mask=is_choice)
    if FUNCTION == "sigmoid":
        scores = tl.div_rn(scores, tl.maximum(tl.sum(scores, 1), _TINY)[:, None])
    tl.store(scores_ptr + index, scores, mask=real)


@triton.jit
def _normalize_backward(grad, p, total):
    """Compute the gradient of x from the gradient of p = x / max(total, tiny), with total = sum of x, along the last
    axis."""
    inner = tl.where(total >= _TINY, tl.sum(grad * p, 1), 0.0)
    return tl.div_rn(grad - inner[:, None], tl.maximum(total, _TINY)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_backward(
    logits_ptr,
    ids_ptr,
    d_weights_ptr,
    d_scores_ptr,
    d_logits_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    FUNCTION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, LANES)
    is_token = t < num_tokens
    real = is_token[:, None] & (lane < E)[None, :]
    index = t[:, None] * E + lane[None, :]
    logits = tl.load(logits_ptr + index, mask=real, other=0.0)
    scores = _scores(logits, real, FUNCTION)
    d_scores = tl.zeros((BLOCK_T, LANES), tl.float32)
    if d_scores_ptr is not None:
        d_scores = tl.load(d_scores_ptr + index, mask=real, other=0.0)
        if FUNCTION == "sigmoid":
            total = tl.sum(scores, 1)
            p = tl.div_rn(scores, tl.maximum(total, _TINY)[:, None])
            d_scores = tl.where(real, _normalize_backward(d_scores, p, total), 0.0)

    d_chosen = tl.zeros((BLOCK_T, LANES), tl.float32)  # of the scores, or of the logits after top-k
    if d_weights_ptr is not None:
        column = tl.arange(0, COLUMNS)
        place = t[:, None] * K + column[None, :]
        is_choice = is_token[:, None] & (column < K)[None, :]
        chosen = tl.load(ids_ptr + place, mask=is_choice, other=0).to(tl.int32)
        grad = tl.load(d_weights_ptr + place, mask=is_choice, other=0.0) * scale
        if FUNCTION == "softmax_after_topk":
            x = tl.where(is_choice, tl.gather(logits, chosen, 1), float("-inf"))
            p = _softmax(x)
            grad = p * (grad - tl.sum(grad * p, 1)[:, None])
        elif NORMALIZE:
            x = tl.where(is_choice, tl.gather(scores, chosen, 1), 0.0)
            total = tl.sum(x, 1)
            p = tl.div_rn(x, tl.maximum(total, _TINY)[:, None])
            grad = _normalize_backward(grad, p, total)
        for j in range(K):
            here = column[None, :] == j
            chosen_j = tl.sum(tl.where(here, chosen, 0), 1)
            grad_j = tl.sum(tl.where(here, grad, 0.0), 1)
            d_chosen += tl.where(lane[None, :] == chosen_j[:, None], grad_j[:, None], 0.0)

    if FUNCTION == "softmax_after_topk":
        d_logits = d_chosen + scores * (d_scores - tl.sum(d_scores * scores, 1)[:, None])
    else:
        d_scores += d_chosen
        if FUNCTION == "sigmoid":
            d_logits = d_scores * scores * (1.0 - scores)
        else:
            d_logits = scores * (d_scores - tl.sum(d_scores * scores, 1)[:, None])
    tl.store(d_logits_ptr + index, d_logits, mask=real)


def _blocks(num_tokens: int, lanes: int) -> tuple[int, int]:
    """Tokens per program and number of its warps, from shapes only."""
    block_t = max(_PROGRAM_LANES // lanes, 1)
    if triton.cdiv(num_tokens, block_t) < _FEW_PROGRAMS:
        block_t = max(block_t // 4, 1)
    return block_t, min(max(block_t * lanes // _LANES_PER_WARP, 1), 8)


def choose(
    logits_TE: Tensor,  # (T, E) FP32, E up to MAX_EXPERTS
    top_k: int,  # K, from 1 to E
    rule: SelectionRule,  # options of the choice
    *,
    noise_TE: Tensor | None = None,  # (T, E) FP32, added to the logits for the choice only
    bias_E: Tensor | None = None,  # (E,) FP32, added to the scores for the choice only
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute every token's K best experts, their routing weights, and the scores for the balance loss; one launch.

    Returns:
        ids (T, K) int64 in descending order of the criterion, ties to the lower id; weights (T, K) FP32; scores
        (T, E) FP32 that sum to 1 per token. Does not synchronise.
    """
    num_tokens, num_experts = logits_TE.shape
    groups = rule.num_expert_groups
    group_lanes = next_power_of_2(groups)
    size_lanes = max(next_power_of_2(num_experts // groups), 2)
    block_t, num_warps = _blocks(num_tokens, group_lanes * size_lanes)
    device = logits_TE.device
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    scores = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    launch(
        _choose,
        (triton.cdiv(num_tokens, block_t),),
        logits_TE.contiguous(),
        None if noise_TE is None else noise_TE.contiguous(),
        None if bias_E is None else bias_E.contiguous(),
        ids,
        weights,
        scores,
        num_tokens,
        rule.weight_scale,
        E=num_experts,
        K=top_k,
        FUNCTION=rule.score_function,
        NORMALIZE=rule.normalize,
        GROUPS=groups,
        LIMIT=rule.num_limited_groups,
        BEST=rule.num_group_scores,
        G=group_lanes,
        S=size_lanes,
        COLUMNS=max(next_power_of_2(top_k), 2),
        BLOCK_T=block_t,
        num_warps=num_warps,
    )
    return ids, weights, scores


def choose_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,  # (T, K) ids that `choose` returned
    rule: SelectionRule,
    d_weights_TK: Tensor | None,  # (T, K) FP32, or None for zero
    d_scores_TE: Tensor | None,  # (T, E) FP32, or None for zero
) -> Tensor:
    """Compute the gradient of the logits, (T, E) FP32, from the gradients of the weights and of the scores; one
    launch."""
    num_tokens, num_experts = logits_TE.shape
    lanes = max(next_power_of_2(num_experts), 2)
    block_t, num_warps = _blocks(num_tokens, lanes)
    d_logits = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    launch(
        _choose_backward,
        (triton.cdiv(num_tokens, block_t),),
        logits_TE.contiguous(),
        ids_TK.contiguous(),
        None if d_weights_TK is None else d_weights_TK.contiguous(),
        None if d_scores_TE is None else d_scores_TE.contiguous(),
        d_logits,
        num_tokens,
        rule.weight_scale,
        E=num_experts,
        K=ids_TK.shape[1],
        FUNCTION=rule.score_function,
        NORMALIZE=rule.normalize,
        LANES=lanes,
        COLUMNS=max(next_power_of_2(ids_TK.shape[1]), 2),
        BLOCK_T=block_t,
        num_warps=num_warps,
    )
    return d_logits
