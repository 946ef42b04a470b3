"""Selection of experts and routing weights from logits: the one rule behind all routers that give logits."""

import math

import torch
from torch import Tensor

from expertmesh.config.moe_rules import GROUP_SCORES, LayerOptions
from expertmesh.moe.capacity import Ratio, capacity_of, valid_tokens_per_group
from expertmesh.moe.routing_noise import STREAM_HASH, philox4x32
from expertmesh.moe.types import Routing
from expertmesh.ops.op_set import OpSet
from expertmesh.ops.topk import choose_experts, runs_fused


def scores_of(logits_TE: Tensor, options: LayerOptions, arithmetic: OpSet) -> Tensor:
    """Logits -> scores: sigmoid, or softmax over all experts (for softmax_after_topk as well)."""
    if options.score_function == "sigmoid":
        return arithmetic.sigmoid(logits_TE)
    return arithmetic.softmax(logits_TE)


def normalized(scores_TE: Tensor, arithmetic: OpSet) -> Tensor:
    """Divide scores by their sum over the experts; rows of zeros stay zero."""
    total = arithmetic.row_sum(scores_TE)
    return scores_TE / total.clamp_min(torch.finfo(scores_TE.dtype).tiny)


def weights_at(
    logits_TE: Tensor,  # (T, E) clean logits
    scores_TE: Tensor,  # (T, E) their scores
    expert_ids_TK: Tensor,  # (T, K) int64 in [0, E]; choices equal to E get weight 0
    *,
    normalize: bool,  # see above
    options: LayerOptions,
    arithmetic: OpSet,  # op set of the call
) -> Tensor:
    """Routing weights of given choices, differentiable.

    softmax, sigmoid: w_j = score_j, divided by sum_i score_i over the choices if `normalize`;
    softmax_after_topk: w = softmax over the choices' logits. All times `weight_scale`.
    """
    live_TK = expert_ids_TK < options.num_experts
    index_TK = expert_ids_TK.clamp(max=options.num_experts - 1)
    if options.score_function == "softmax_after_topk":
        chosen_TK = logits_TE.gather(-1, index_TK).masked_fill(~live_TK, -math.inf)
        # A token without any choice has only -inf: softmax gives NaN there, in the gradient too, so shift it to 0.
        chosen_TK = chosen_TK.masked_fill(~live_TK.any(-1, keepdim=True), 0.0)
        weights_TK = arithmetic.softmax(chosen_TK).masked_fill(~live_TK, 0.0)
    else:
        weights_TK = scores_TE.gather(-1, index_TK).masked_fill(~live_TK, 0.0)
        if normalize:
            weights_TK = normalized(weights_TK, arithmetic)
    return weights_TK * options.weight_scale


def _limit_groups(selection_TE: Tensor, options: LayerOptions) -> Tensor:
    """Set the scores of all experts outside the token's best groups to -inf (DeepSeek-V3, section 2.1.2).

    A group's score is the sum of the two best (biased) scores in it, or the best one (DeepSeek-V2, section 2.2.2).
    """
    grouped_TXE = selection_TE.unflatten(-1, (options.num_expert_groups, -1))
    count = GROUP_SCORES[options.group_score]
    best = grouped_TXE.topk(min(count, grouped_TXE.shape[-1]), dim=-1).values.sum(-1)
    groups = best.topk(options.num_limited_groups, dim=-1).indices
    allowed_TX = torch.zeros_like(best, dtype=torch.bool).scatter(-1, groups, True)
    result: Tensor = grouped_TXE.masked_fill(~allowed_TX[..., None], -math.inf).flatten(-2)
    return result


def selection_scores(
    logits_TE: Tensor,
    noise_TE: Tensor | None,
    bias_E: Tensor | None,
    options: LayerOptions,
    arithmetic: OpSet,
) -> Tensor:
    """(T, E) values that the choice compares, detached: the noisy logits, or their scores plus the balancing bias.

    Scores are needed only with a bias or a group limit. Otherwise logits give the same order without the rounding of
    the score function.
    """
    chosen_by = logits_TE.detach() if logits_TE.requires_grad else logits_TE
    if noise_TE is not None:
        chosen_by = chosen_by + noise_TE
    if bias_E is None and options.num_expert_groups == 1:
        return chosen_by
    if options.score_function != "softmax_after_topk":
        chosen_by = scores_of(chosen_by, options, arithmetic)
    if bias_E is not None:
        chosen_by = chosen_by + bias_E.to(chosen_by.dtype)
    return _limit_groups(chosen_by, options) if options.num_expert_groups > 1 else chosen_by


def choose_by_token(
    logits_TE: Tensor,  # (T, E) clean logits, FP32 or FP64
    top_k: int,
    *,
    options: LayerOptions,
    arithmetic: OpSet,  # op set of the call
    noise_TE: Tensor | None = None,  # added to the logits for the choice
    bias_E: Tensor | None = None,
    with_load: bool = False,
) -> Routing:
    """Choose the `top_k` best experts of every token.

    Noise and bias affect the choice only; weights and losses use the clean scores.

    Args:
        bias_E: aux-loss-free balancing bias, added to the scores for the choice (DeepSeek-V3, eq. 16).
        with_load: also give the probability of being chosen under Gaussian noise of `options.router_noise_std`.

    Returns:
        Routing with each token's choices in descending order of `selection_scores`. Does not synchronise.
    """
    normalize = options.normalizes(top_k)
    # the fused kernel splits a row's sums over threads depending on the number of rows
    if not arithmetic.batch_invariant and runs_fused(logits_TE, options.backend):
        ids_TK, weights_TK, scores_TE = choose_experts(
            logits_TE,
            top_k,
            score_function=options.score_function,
            normalize=normalize,
            weight_scale=options.weight_scale,
            noise_TE=noise_TE,
            bias_E=bias_E,
            num_expert_groups=options.num_expert_groups,
            num_limited_groups=options.num_limited_groups,
            group_score=options.group_score,
            backend=options.backend,
        )
    else:
        raw_TE = scores_of(logits_TE, options, arithmetic)
        ids_TK = selection_scores(logits_TE, noise_TE, bias_E, options, arithmetic).topk(top_k, dim=-1).indices
        weights_TK = weights_at(logits_TE, raw_TE, ids_TK, normalize=normalize, options=options, arithmetic=arithmetic)
        scores_TE = balance_scores(raw_TE, options, arithmetic)
    load_TE = None
    if with_load and noise_TE is not None:
        load_TE = chosen_probability(logits_TE, logits_TE + noise_TE, top_k, options.router_noise_std)
    return Routing(ids_TK, weights_TK, scores_TE, logits_TE, load_TE)


def balance_scores(scores_TE: Tensor, options: LayerOptions, arithmetic: OpSet) -> Tensor:
    """Scores that sum to 1 per token, for the balance loss."""
    return normalized(scores_TE, arithmetic) if options.score_function == "sigmoid" else scores_TE


def chosen_probability(logits_TE: Tensor, noisy_TE: Tensor, top_k: int, std: float) -> Tensor:
    """P(expert is among the K best if only its own noise is drawn anew) (Shazeer et al. 2017, eq. 8-9).

    Phi((clean logit - K-th best noisy logit of the others) / std).
    """
    if top_k == logits_TE.shape[-1]:
        return torch.ones_like(logits_TE)
    best = noisy_TE.topk(top_k + 1, dim=-1).values
    is_chosen = noisy_TE > best[:, top_k:]
    threshold = torch.where(is_chosen, best[:, top_k:], best[:, top_k - 1 : top_k])
    result: Tensor = torch.special.ndtr((logits_TE - threshold) / std)
    return result


def choose_by_expert(
    logits_TE: Tensor,  # (T, E) clean logits
    top_k: int,  # mean number of experts per token
    *,
    options: LayerOptions,
    arithmetic: OpSet,  # op set of the call
    factor: Ratio,  # capacity factor as an exact ratio
    token_mask_T: Tensor | None,  # True for real tokens; the others are never chosen
    noise_TE: Tensor | None = None,  # added to the logits for the choice
) -> Routing:
    """Choose the C best tokens of every expert in each routing group (Zhou et al., arXiv 2202.09368).

    C = ceil(T_g * top_k / E * factor). A choice depends on the other tokens of the group, later ones
    included: it does not suit token-by-token generation.

    Returns:
        K = E slots per token: slot e holds e if expert e chose the token, else E. Does not synchronise.
    """
    T, E = logits_TE.shape
    scores_TE = scores_of(logits_TE, options, arithmetic)
    chosen_by = logits_TE.detach() if noise_TE is None else logits_TE.detach() + noise_TE
    chosen_by = scores_of(chosen_by, options, arithmetic)
    if token_mask_T is not None:
        chosen_by = chosen_by.masked_fill(~token_mask_T[:, None], -math.inf)
    group_size = options.routing_group_size
    size = T if group_size is None else min(group_size, T)
    num_groups = -(-T // size) if T else 0
    if num_groups == 0:
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
    else:
        padding = num_groups * size - T
        padded = torch.nn.functional.pad(chosen_by, (0, 0, 0, padding), value=-math.inf)
        grouped = padded.view(num_groups, size, E)
        largest = min(capacity_of(size, top_k, E, factor, min_capacity=1), size)
        best = grouped.topk(largest, dim=1)
        valid_U = valid_tokens_per_group(T, group_size, token_mask_T, logits_TE.device)
        limit_U = capacity_of(valid_U, top_k, E, factor, min_capacity=1)
        rank = torch.arange(largest, device=logits_TE.device)[None, :, None]
        within = (rank < limit_U[:, None, None]) & (best.values > -math.inf)
        chosen = torch.zeros_like(grouped, dtype=torch.bool).scatter(1, best.indices, within)
        chosen_TE = chosen.view(num_groups * size, E)[:T]
    experts_E = torch.arange(E, device=logits_TE.device)
    ids_TK = torch.where(chosen_TE, experts_E, E)
    normalize = options.normalizes(top_k)
    weights_TK = weights_at(logits_TE, scores_TE, ids_TK, normalize=normalize, options=options, arithmetic=arithmetic)
    return Routing(ids_TK, weights_TK, balance_scores(scores_TE, options, arithmetic), logits_TE)


def hash_experts(token_ids_T: Tensor, hash_key: Tensor, top_k: int, num_experts: int) -> Tensor:
    """K distinct experts for each token id, a pure function of (key, layer, id).

    Double hashing: expert_j = (a + j * b) mod E, with a uniform in [0, E) and b uniform among the numbers coprime
    to E, so that the first E members of the sequence are a permutation.

    Args:
        token_ids_T: (T,) integer ids.
        hash_key: (2,) int64, (seed, layer).

    Returns:
        (T, K) int64. Does not synchronise.
    """
    ids = token_ids_T.to(torch.int64)
    seed, layer = hash_key.unbind(0)
    mask = 0xFFFFFFFF
    stream = torch.full_like(seed, STREAM_HASH)
    words = philox4x32(ids & mask, (ids >> 32) & mask, layer & mask, stream, seed & mask, (seed >> 32) & mask)
    num_steps = sum(math.gcd(b, num_experts) == 1 for b in range(1, num_experts + 1))
    # computed on the device, because copying a list from the host would synchronise
    b_E = torch.arange(1, num_experts + 1, device=ids.device)
    is_coprime_E = torch.gcd(b_E, torch.full_like(b_E, num_experts)) == 1
    steps_E = torch.where(is_coprime_E, b_E, num_experts + 1).sort().values
    step_T = steps_E[words[:, 1] % num_steps]
    j = torch.arange(top_k, device=ids.device)
    result: Tensor = (words[:, :1] + j * step_T[:, None]) % num_experts
    return result


def choose_by_hash(
    token_ids_T: Tensor,
    hash_key: Tensor,
    top_k: int,
    *,
    options: LayerOptions,
    dtype: torch.dtype,
) -> Routing:
    """Choose the experts that each token's id hashes to; nothing is learned, so nothing is balanced.

    Each of the K experts has weight 1 (1 / K when normalised), times `weight_scale`.
    """
    ids_TK = hash_experts(token_ids_T, hash_key, top_k, options.num_experts)
    weight = options.weight_scale / (top_k if options.normalizes(top_k) else 1)
    return Routing(ids_TK, torch.full(ids_TK.shape, weight, dtype=dtype, device=ids_TK.device))
