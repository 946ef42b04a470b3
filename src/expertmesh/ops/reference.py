"""Plain-PyTorch oracles of the operators: short, obviously correct, differentiable any number of times, slow.

They are the "reference" backend; tests compare every other backend with them.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.config.moe_rules import GROUP_SCORES
from expertmesh.ops.activation import activate
from expertmesh.ops.dtypes import accumulate_dtype


def route_metadata(
    expert_ids_TK: Tensor, num_experts: int, max_rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (offsets, token_of_row, slot_of_row, row_of_slot) by one pass over the ids per expert."""
    top_k = max(expert_ids_TK.shape[1], 1)
    ids_N = expert_ids_TK.reshape(-1)
    slots_by_expert = [torch.nonzero(ids_N == e).flatten() for e in range(num_experts + 1)]
    counts = [0, *[len(slots) for slots in slots_by_expert[:num_experts]]]
    order = torch.cat(slots_by_expert)
    row_of_slot_N = torch.empty_like(order)
    row_of_slot_N[order] = torch.arange(len(order), device=order.device)
    order = order[: len(order) if max_rows is None else max_rows]
    offsets_E = torch.tensor(counts, device=ids_N.device).cumsum(0)
    maps = (offsets_E, order // top_k, order, row_of_slot_N)
    offsets, token_of_row, slot_of_row, row_of_slot = (m.to(torch.int32) for m in maps)
    return offsets, token_of_row, slot_of_row, row_of_slot


def gather_rows(source: Tensor, index_R: Tensor, num_live: int) -> Tensor:
    """Gather rows source[index] for the first num_live rows, with zeros behind."""
    live = torch.arange(len(index_R), device=index_R.device) < num_live
    return torch.where(live[:, None], source[index_R.long().clamp(max=max(len(source) - 1, 0))], 0)


def rows_to_slots(rows_RD: Tensor, row_of_slot_N: Tensor, num_live: int) -> Tensor:
    """Copy (R, D) rows to (N, D) slots; dead slots are zero."""
    live = row_of_slot_N < num_live
    padded = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])
    return padded[torch.where(live, row_of_slot_N.long(), len(rows_RD))]


def combine(rows_RD: Tensor, row_of_slot_N: Tensor, num_live: int, top_k: int) -> Tensor:
    """Sum each token's rows in FP32 (FP64 for FP64 rows), rounded once."""
    wide = rows_to_slots(rows_RD, row_of_slot_N, num_live).to(accumulate_dtype(rows_RD.dtype))
    num_tokens = len(row_of_slot_N) // top_k
    return wide.view(num_tokens, top_k, rows_RD.shape[1]).sum(1).to(rows_RD.dtype)


def _scores_of(logits_TE: Tensor, score_function: str) -> Tensor:
    return logits_TE.sigmoid() if score_function == "sigmoid" else logits_TE.softmax(-1)


def _normalized(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def choose_experts(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_function: str,
    noise_TE: Tensor | None = None,
    bias_E: Tensor | None = None,
    num_expert_groups: int = 1,
    num_limited_groups: int = 1,
    group_score: str = "top2_sum",
) -> Tensor:
    """Compute the ids (T, K) by full sorts, ties to the lower id; see `ops.topk.choose_experts`."""
    criterion = logits_TE.detach() if noise_TE is None else logits_TE.detach() + noise_TE
    if (bias_E is not None or num_expert_groups > 1) and score_function != "softmax_after_topk":
        criterion = _scores_of(criterion, score_function)
    criterion = criterion if bias_E is None else criterion + bias_E
    if num_expert_groups > 1:
        grouped = criterion.unflatten(-1, (num_expert_groups, -1))
        strength = grouped.sort(-1, descending=True).values[..., : GROUP_SCORES[group_score]].sum(-1)
        order = strength.sort(dim=-1, descending=True, stable=True).indices
        far = order.argsort(-1) >= num_limited_groups
        criterion = grouped.masked_fill(far[..., None], -torch.inf).flatten(-2)
    return criterion.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def weigh_experts(
    logits_TE: Tensor,
    ids_TK: Tensor,
    *,
    score_function: str,
    normalize: bool,
    weight_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the weights (T, K) of a choice and scores (T, E) that sum to 1; see `ops.topk.choose_experts`."""
    scores_TE = _scores_of(logits_TE, score_function)
    if score_function == "softmax_after_topk":
        weights_TK = logits_TE.gather(-1, ids_TK).softmax(-1)
    else:
        weights_TK = scores_TE.gather(-1, ids_TK)
        weights_TK = _normalized(weights_TK) if normalize else weights_TK
    scores_TE = _normalized(scores_TE) if score_function == "sigmoid" else scores_TE
    return weights_TK * weight_scale, scores_TE


def moe_mlp(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    *,
    activation: str,
    b_in_EGF: Tensor | None = None,
    b_out_ED: Tensor | None = None,
) -> Tensor:
    """Compute experts on sorted rows, with the routing weight applied to the activation, and the sum per token."""
    num_experts, num_branches, hidden_dim, dim = w_in_EGFD.shape
    bounds = offsets_E.tolist()
    rows = [x_TD.new_zeros(0, dim)]
    for e in range(num_experts):
        span = slice(bounds[e], bounds[e + 1])
        h = x_TD[token_of_row_N[span].long()] @ w_in_EGFD[e].reshape(-1, dim).T
        if b_in_EGF is not None:
            h = h + b_in_EGF[e].reshape(-1)
        scale = weights_TK.reshape(-1)[slot_of_row_N[span].long()].to(x_TD.dtype)[:, None]
        y = (activate(h.view(-1, num_branches, hidden_dim), activation) * scale) @ w_out_EDF[e].T
        if b_out_ED is not None:
            y = y + scale * b_out_ED[e]
        rows.append(y)
    y_RD = torch.cat(rows)
    return combine(y_RD, row_of_slot_N, bounds[-1], weights_TK.shape[1])


class _Deposit(torch.autograd.Function):
    """Identity whose gradient is added to a buffer instead of being propagated."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.buffer.add_(grad)
        return None, None


def deposit(weight: Tensor, buffer: Tensor) -> Tensor:
    """Return the weight, with its gradient added to the buffer instead of to `.grad`."""
    deposited: Tensor = _Deposit.apply(weight, buffer)
    return deposited
