"""Balance losses and the router z-loss, normalised by the number of valid tokens."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.moe.capacity import (
    count_all_choices,
    count_choices,
    group_sizes,
    valid_tokens_per_group,
)
from expertmesh.moe.layer_call import LayerCall
from expertmesh.moe.types import Routing
from expertmesh.ops.check import BOOL, Arg, check_tensor
from expertmesh.ops.dtypes import without_autocast

SumOverProcesses = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the processes that share a batch, differentiably."""


def weighted_losses(
    call: LayerCall,
    routing: Routing,
    *,
    sum_over_processes: SumOverProcesses,
    earlier_RE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Weighted balance loss, weighted z-loss, (E,) choices per expert before dropping, and (R, E) sums of a global
    balance loss.

    Without routing groups the balance loss is over the tokens of all processes. With routing groups it is over this
    process's groups. The z-loss is over this process's tokens. Means of such local losses over processes, weighted by
    valid tokens, are the losses of the whole batch. Choices are counted over all processes. If processes share the
    tokens of one call, groups span that call and every process has the same balance loss. `earlier_RE` holds the sums
    of earlier calls of the same batch. Does not synchronise by itself.
    """
    options, groups, token_mask_T = call.options, call.groups, call.token_mask_T
    size, num_experts, kind = options.loss_group_size, options.num_experts, options.balance_loss
    spans = groups is not None and size is not None
    own_ids_TK = routing.expert_ids_TK
    if groups is not None and spans:
        routing, token_mask_T = groups.balanced(routing), groups.gather_mask(token_mask_T)
    ids_TK, scores_TE = routing.expert_ids_TK, routing.scores_TE
    counted_TK = ids_TK[:, :1] if kind == "gshard" else ids_TK
    counts_UE = None if size is None else count_choices(counted_TK, num_experts, size)
    counts_all = counts_UE is not None and not spans and kind != "gshard"
    counts_E = sum_over_processes(
        counts_UE.sum(0) if counts_UE is not None and counts_all else count_all_choices(own_ids_TK, num_experts)
    )
    balanced_UE = counts_E[None] if counts_UE is None else counts_UE
    if counts_UE is None and kind == "gshard":
        balanced_UE = sum_over_processes(count_all_choices(counted_TK, num_experts))[None]
    assert routing.weights_TK is not None
    # two tensors, so that an in-place addition to one does not change the other
    aux_loss, z_loss = (routing.weights_TK.new_zeros(()) for _ in range(2))
    sums_RE: Tensor | None = None
    with without_autocast(aux_loss.device):
        is_none = not options.aux_loss_weight or kind == "none"
        if is_none or scores_TE is None:
            pass
        elif options.balance_loss_scope == "global":
            balance, sums_RE = global_balance_loss(
                scores_TE,
                balanced_UE[0],
                of_scores=kind == "importance_load",
                load_TE=routing.load_TE,
                token_mask_T=token_mask_T,
                sum_over_processes=sum_over_processes,
                earlier_RE=earlier_RE,
            )
            aux_loss = options.aux_loss_weight * balance
        else:
            loss: Callable[..., Tensor] = switch_loss
            if kind == "importance_load":
                loss = partial(importance_load_loss, load_TE=routing.load_TE)
            aux_loss = options.aux_loss_weight * loss(
                scores_TE,
                balanced_UE,
                token_mask_T=token_mask_T,
                group_size=size,
                sum_over_processes=sum_over_processes if counts_UE is None else None,
            )
        if options.z_loss_weight and routing.logits_TE is not None:
            z_loss = options.z_loss_weight * router_z_loss(routing.logits_TE, token_mask_T=call.token_mask_T)
    return aux_loss, z_loss, counts_E, sums_RE


def _sums(
    values_TE: Tensor,
    token_mask_T: Tensor | None,
    group_size: int | None,
    sum_over_processes: SumOverProcesses | None,
) -> Tensor:
    """(T, E) -> (number of groups, E) sums over the valid tokens of each routing group, or of one group over all
    processes."""
    if token_mask_T is not None:
        values_TE = values_TE.masked_fill(~token_mask_T[:, None], 0)
    T, E = values_TE.shape
    num_groups, size = group_sizes(T, group_size)
    if num_groups == 1:
        sums_UE = values_TE.sum(0, keepdim=True)
        return sums_UE if sum_over_processes is None else sum_over_processes(sums_UE)
    padded = torch.nn.functional.pad(values_TE, (0, 0, 0, num_groups * size - T))
    return padded.view(num_groups, size, E).sum(1)


_TOKEN_MASK = Arg("T", BOOL, "one per token", reshape="flatten it")


def _check_mask(values_TE: Tensor, token_mask_T: Tensor | None) -> None:
    if token_mask_T is not None:
        check_tensor("token_mask", token_mask_T, _TOKEN_MASK, {"T": values_TE.shape[0]})


def _valid(
    values_TE: Tensor,
    num_choices_UE: Tensor,
    token_mask_T: Tensor | None,
    group_size: int | None,
    sum_over_processes: SumOverProcesses | None,
) -> Tensor:
    num_experts = values_TE.shape[-1]
    if values_TE.ndim != 2 or num_choices_UE.shape[-1] != num_experts:
        raise ConfigError(
            f"num_choices has shape {tuple(num_choices_UE.shape)} and the scores {tuple(values_TE.shape)}; they must "
            "be (groups, experts) and (tokens, experts) of as many experts; give the num_experts of count_choices"
        )
    _check_mask(values_TE, token_mask_T)
    valid_U = valid_tokens_per_group(values_TE.shape[0], group_size, token_mask_T, values_TE.device)
    if num_choices_UE.ndim > 1 and num_choices_UE.shape[0] != valid_U.shape[0]:
        raise ConfigError(
            f"num_choices has {num_choices_UE.shape[0]} routing groups and group_size={group_size} makes "
            f"{valid_U.shape[0]} of the tokens;"
            " they must be equally many; give the group_size of count_choices"
        )
    return valid_U if sum_over_processes is None else sum_over_processes(valid_U)


def _mean_groups(loss_U: Tensor, valid_U: Tensor) -> Tensor:
    """Mean over the routing groups, weighted by valid tokens; 0 without valid tokens."""
    if loss_U.shape[0] == 1:
        return loss_U.squeeze(0)
    share = valid_U.to(loss_U.dtype) / valid_U.sum().clamp(min=1)
    return (loss_U * share).sum()


def switch_loss(
    scores_TE: Tensor,
    num_choices_UE: Tensor,
    *,
    token_mask_T: Tensor | None = None,
    group_size: int | None = None,
    sum_over_processes: SumOverProcesses | None = None,
) -> Tensor:
    """Load-balancing loss E * sum_e f_e * P_e; 1.0 when routing is uniform.

    f_e is expert e's share of all choices, P_e the mean score of e (Switch Transformer, arXiv
    2101.03961, eq. 4-6, and GShard for K = 1; here over all K choices). Per routing group, then averaged over the
    groups by their valid tokens.

    Args:
        scores_TE: (T, E) clean scores, summing to 1 per token; differentiable.
        num_choices_UE: (number of groups, E) integers, choices per expert, before dropping (`count_choices`).
        token_mask_T: (T,) bool, True for real tokens; None: all are.
        group_size: tokens per routing group; None: all tokens are one group.
        sum_over_processes: extends the one group to the tokens of all processes; num_choices_UE must be summed already.

    Returns:
        Scalar, not weighted. Does not synchronise.

    Raises:
        ConfigError: num_choices_UE has another number of groups than group_size makes, or of experts; or token_mask_T
            does not fit.

    Example:
        >>> scores_TE = torch.full((4, 2), 0.5)
        >>> switch_loss(scores_TE, torch.tensor([[2, 2]])).item()
        1.0
    """
    valid_U = _valid(scores_TE, num_choices_UE, token_mask_T, group_size, sum_over_processes)
    sums_UE = _sums(scores_TE, token_mask_T, group_size, sum_over_processes)
    # both means of the definition as one quotient per group; the denominators are integers
    whole_U = num_choices_UE.sum(-1).clamp(min=1) * valid_U.clamp(min=1)
    loss_U = (num_choices_UE * sums_UE).sum(-1) * scores_TE.shape[1] / whole_U
    return _mean_groups(loss_U, valid_U)


def _cv_squared(values_UE: Tensor) -> Tensor:
    """Squared coefficient of variation over the experts: variance (population) / mean^2; 0 where all are 0."""
    mean = values_UE.mean(-1, keepdim=True)
    tiny = torch.finfo(values_UE.dtype).tiny
    return (values_UE - mean).square().mean(-1) / mean.square().clamp_min(tiny).squeeze(-1)


def importance_load_loss(
    scores_TE: Tensor,
    num_choices_UE: Tensor,
    *,
    load_TE: Tensor | None = None,
    token_mask_T: Tensor | None = None,
    group_size: int | None = None,
    sum_over_processes: SumOverProcesses | None = None,
) -> Tensor:
    """Importance and load loss (CV^2(importance) + CV^2(load)) / 2; 0 when routing is uniform.

    Importance is the sum of an expert's scores over the tokens, load the expected number of tokens that choose it
    (Shazeer et al. 2017, arXiv 1701.06538, eq. 6-11; halved as in V-MoE). Without Gaussian noise the load is the number
    of choices made, which has no gradient.

    Args:
        scores_TE: (T, E) clean scores.
        num_choices_UE: (number of groups, E) choices per expert before dropping.
        load_TE: (T, E) probability of being chosen, differentiable, or None.
        token_mask_T: (T,) bool, True for real tokens; None: all are.
        group_size: tokens per routing group; None: all tokens are one group.
        sum_over_processes: extends the one group to the tokens of all processes; num_choices_UE must be summed already.

    Returns:
        Scalar, not weighted. Does not synchronise.

    Raises:
        ConfigError: num_choices_UE has another number of groups than group_size makes, or of experts; or token_mask_T
            does not fit.

    Example:
        >>> scores_TE = torch.full((4, 2), 0.5)
        >>> importance_load_loss(scores_TE, torch.tensor([[2, 2]])).item()
        0.0
    """
    valid_U = _valid(scores_TE, num_choices_UE, token_mask_T, group_size, sum_over_processes)
    importance_UE = _sums(scores_TE, token_mask_T, group_size, sum_over_processes)
    if load_TE is None:
        load_UE = num_choices_UE.to(scores_TE.dtype)
    else:
        load_UE = _sums(load_TE, token_mask_T, group_size, sum_over_processes)
    return _mean_groups((_cv_squared(importance_UE) + _cv_squared(load_UE)) / 2, valid_U)


def global_balance_loss(
    scores_TE: Tensor,  # (T, E) clean scores, differentiable
    num_choices_E: Tensor,  # (E,) integers, choices per expert in this call, summed over processes
    *,
    of_scores: bool = False,  # compute the importance and load loss instead of Switch's
    load_TE: Tensor | None = None,  # see `importance_load_loss`
    token_mask_T: Tensor | None = None,  # (T,) bool, True for real tokens; None: all are
    sum_over_processes: SumOverProcesses | None = None,
    earlier_RE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Balance loss of one micro-batch, with expert counts of the global batch up to this micro-batch.

    Micro-batch m has the loss L_m, with F_n (E,) the choices in micro-batch n on all processes and P_m (E,) the mean
    scores in m:

        L_m = E * sum_e f_e P_m,e,  f = sum_{n <= m} F_n / sum_{n <= m} sum_e F_n,e.

    This is Megatron-Core's `global_aux_loss`, and the buffered form of Qiu et al. 2025 (arXiv 2501.11873, 3). The
    batch's loss is the mean of L_m, weighted by valid tokens. Gradients flow through P_m only: a token's score of
    expert e has the gradient E f_e / tokens. It is exact for the whole batch in the last micro-batch; earlier ones use
    f of the micro-batches so far. A batch of one micro-batch therefore has the loss of `switch_loss` to the bit, a
    batch of several only approximately. The importance and load loss takes the sums S_n of scores (and loads) over n <=
    m, scaled to the size of m, with the gradient of S_m.

    Args:
        sum_over_processes: sums over the tokens of all processes; None: there is one process.
        earlier_RE: sum of this function's second results for earlier micro-batches; None: this is the first.

    Returns:
        Scalar loss, not weighted; and (R, E) FP64 sums of this call, detached: choices, then for importance and load
        the sums of scores and loads. Does not synchronise.
    """
    counts_E = num_choices_E
    if earlier_RE is not None:
        counts_E = counts_E + earlier_RE[0].to(counts_E.dtype)
    own_RE = num_choices_E.double()[None]
    if not of_scores:
        loss = switch_loss(
            scores_TE,
            counts_E[None],
            token_mask_T=token_mask_T,
            sum_over_processes=sum_over_processes,
        )
        return loss, own_RE
    sums_E = [_sums(scores_TE, token_mask_T, None, sum_over_processes)[0]]
    if load_TE is not None:
        sums_E.append(_sums(load_TE, token_mask_T, None, sum_over_processes)[0])
    own_RE = torch.stack((own_RE[0], *(each.detach().double() for each in sums_E)))
    if earlier_RE is not None:
        # scores sum to one per token, so these are shares of tokens
        tiny = torch.finfo(scores_TE.dtype).tiny
        share = own_RE[1].sum() / (own_RE[1] + earlier_RE[1]).sum().clamp_min(tiny)
        sums_E = [
            _on_top(own_E, earlier_E, share.to(own_E.dtype))
            for own_E, earlier_E in zip(sums_E, earlier_RE[1:], strict=True)
        ]
    if load_TE is None:
        sums_E.append(counts_E.to(scores_TE.dtype))
    return _cv_squared(torch.stack(sums_E)).sum() / 2, own_RE


def _on_top(sums_E: Tensor, earlier_E: Tensor, share: Tensor) -> Tensor:
    """Sums up to this micro-batch, scaled to its size, with the gradient of its own sums."""
    own = sums_E.detach()
    return sums_E + ((own + earlier_E.to(own.dtype)) * share - own)


def router_z_loss(logits_TE: Tensor, *, token_mask_T: Tensor | None = None) -> Tensor:
    """mean over valid tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).

    Args:
        logits_TE: (T, E) clean logits (after the temperature).
        token_mask_T: (T,) bool, True for real tokens; None: all are.

    Returns:
        Scalar, not weighted; 0 for no tokens. Does not synchronise.

    Raises:
        ConfigError: token_mask_T has another shape or type.

    Example:
        >>> router_z_loss(torch.zeros(4, 1)).item()
        0.0
    """
    _check_mask(logits_TE, token_mask_T)
    squares_T = logits_TE.logsumexp(-1).square()
    if token_mask_T is None:
        return squares_T.sum() / max(logits_TE.shape[0], 1)
    valid = token_mask_T.sum().clamp(min=1)
    return squares_T.masked_fill(~token_mask_T, 0).sum() / valid
