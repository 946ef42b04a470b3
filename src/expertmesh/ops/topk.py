"""Top-k choice of experts: from router logits to expert ids, routing weights and scores, in one operator."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.config.moe_rules import GROUP_SCORES
from expertmesh.config.values import check_choice
from expertmesh.errors import ConfigError
from expertmesh.ops import reference
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.check import check_like
from expertmesh.ops.transforms import refuse_second_derivative, refuse_transforms

SCORE_FUNCTIONS = ("softmax", "sigmoid", "softmax_after_topk")
_MOST_TRITON_EXPERTS = 2048  # one lane per expert in one program of the kernels


def choose_experts(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_function: str,
    normalize: bool,
    weight_scale: float = 1.0,
    noise_TE: Tensor | None = None,
    bias_E: Tensor | None = None,
    num_expert_groups: int = 1,
    num_limited_groups: int = 1,
    group_score: str = "top2_sum",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose every token's K best experts, with routing weights, and scores of all experts for the balance loss.

    Scores are the softmax or the sigmoid of the logits. The choice compares logits plus noise. With a bias or a group
    limit it compares the scores of logits plus noise (for softmax_after_topk logits plus noise), plus the bias. A group
    limit sets experts to -inf outside the `num_limited_groups` best groups: those with the largest sum of their two
    best values (DeepSeek-V3, section 2.1.2) or with the largest best value (DeepSeek-V2, section 2.2.2). Routing
    weights are the scores of the chosen experts, divided by their sum if `normalize`; for softmax_after_topk they are
    the softmax over the chosen logits. They are multiplied by `weight_scale`. Noise and bias do not enter weights and
    scores.

    Args:
        logits_TE: (T, E) FP32 or FP64.
        top_k: K, from 1 to E, or to the experts of the groups that a token may use.
        score_function: "softmax", "sigmoid" or "softmax_after_topk".
        normalize: see above.
        weight_scale: see above.
        noise_TE: (T, E), or None.
        bias_E: (E,), or None.
        num_expert_groups: groups of consecutive experts; divides E.
        num_limited_groups: groups that a token may use.
        group_score: "top2_sum" or "max", see above.
        backend: see `resolve_backend`. Triton takes FP32 and up to 2048 experts; auto uses torch beyond.

    Returns:
        ids (T, K) int64, best first, ties to the lower id; weights (T, K); scores (T, E) that sum to 1 per token.
        Weights and scores have the dtype of the logits and are differentiable (once with triton, which saves logits
        and ids only). Does not synchronise.

    Raises:
        ConfigError: an option or shape is wrong, or triton was asked for and does not support the call.

    Example:
        >>> logits_TE = torch.tensor([[0.0, 2.0, 1.0]])
        >>> ids_TK, weights_TK, scores_TE = choose_experts(logits_TE, 2, score_function="softmax", normalize=True)
        >>> ids_TK.tolist()
        [[1, 2]]
    """
    num_experts = logits_TE.shape[-1]
    if logits_TE.dim() != 2 or not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"logits have shape {tuple(logits_TE.shape)} and top_k is {top_k}; they must be (tokens, experts) and at "
            "most the number of experts; check both"
        )
    check_choice("score_function", score_function, SCORE_FUNCTIONS)
    _check_groups(top_k, num_experts, num_expert_groups, num_limited_groups, group_score)
    for what, tensor, shape in (
        ("noise", noise_TE, logits_TE.shape),
        ("bias", bias_E, (num_experts,)),
    ):
        if tensor is not None:
            check_like(what, tensor, tuple(shape))
    name = resolve_backend(backend, logits_TE.device, logits_TE.dtype)
    if name == "triton":
        problem = _triton_problem(logits_TE)
        if problem is None:
            refuse_transforms("choose_experts", lambda: [logits_TE])
            noise = None if noise_TE is None else noise_TE.detach().to(logits_TE.dtype)
            bias = None if bias_E is None else bias_E.detach().to(logits_TE.dtype)
            groups = [num_expert_groups, num_limited_groups, GROUP_SCORES[group_score]]
            how = (score_function, normalize, weight_scale)
            return _choose_experts(logits_TE, noise, bias, top_k, *how, groups)
        if backend == "triton":
            raise ConfigError(f"{problem}; use backend='torch'")
    ids_TK = reference.choose_experts(
        logits_TE,
        top_k,
        score_function=score_function,
        noise_TE=noise_TE,
        bias_E=bias_E,
        num_expert_groups=num_expert_groups,
        num_limited_groups=num_limited_groups,
        group_score=group_score,
    )
    weights_TK, scores_TE = reference.weigh_experts(
        logits_TE,
        ids_TK,
        score_function=score_function,
        normalize=normalize,
        weight_scale=weight_scale,
    )
    return ids_TK, weights_TK, scores_TE


def _check_groups(
    top_k: int, num_experts: int, num_expert_groups: int, num_limited_groups: int, group_score: str
) -> None:
    if num_experts % num_expert_groups or not 1 <= num_limited_groups <= num_expert_groups:
        raise ConfigError(
            f"num_expert_groups is {num_expert_groups}, num_limited_groups {num_limited_groups}; the first must divide "
            f"the number of experts, {num_experts}, and not be below the second; change them"
        )
    check_reachable(top_k, num_experts, num_expert_groups, num_limited_groups)
    check_choice("group_score", group_score, GROUP_SCORES)


def check_reachable(top_k: int, num_experts: int, num_expert_groups: int, num_limited_groups: int) -> None:
    """Raise ConfigError if a token would choose more experts than the groups hold that it may choose in."""
    reachable = num_limited_groups * (num_experts // num_expert_groups)
    if num_expert_groups > 1 and top_k > reachable:
        raise ConfigError(
            "top_k",
            top_k,
            f"must be at most the experts in num_limited_groups={num_limited_groups} groups, {reachable}",
            "lower it or raise num_limited_groups",
        )


def runs_fused(logits_TE: Tensor, backend: str) -> bool:
    """Whether `choose_experts` would run as one kernel for these logits."""
    if resolve_backend(backend, logits_TE.device, logits_TE.dtype) != "triton":
        return False
    return _triton_problem(logits_TE) is None


def _triton_problem(logits_TE: Tensor) -> str | None:
    if logits_TE.dtype != torch.float32:
        return f"logits are {logits_TE.dtype}, the triton backend takes float32"
    if logits_TE.shape[1] > _MOST_TRITON_EXPERTS:
        return f"there are {logits_TE.shape[1]} experts, the triton backend takes up to {_MOST_TRITON_EXPERTS}"
    return None


@torch.library.custom_op("expertmesh::choose_experts", mutates_args=())
def _choose_experts(
    logits_TE: Tensor,
    noise_TE: Tensor | None,
    bias_E: Tensor | None,
    top_k: int,
    score_function: str,
    normalize: bool,
    weight_scale: float,
    groups: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    from expertmesh.kernels import topk as kernels

    rule = kernels.SelectionRule(score_function, normalize, weight_scale, *groups)
    return kernels.choose(logits_TE, top_k, rule, noise_TE=noise_TE, bias_E=bias_E)


_choose_experts.register_fake(
    lambda logits, noise, bias, top_k, *rule: (
        logits.new_empty(logits.shape[0], top_k, dtype=torch.int64),
        logits.new_empty(logits.shape[0], top_k),
        logits.new_empty(logits.shape),
    )
)


@torch.library.custom_op("expertmesh::choose_experts_backward", mutates_args=())
def _choose_experts_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    d_weights_TK: Tensor | None,
    d_scores_TE: Tensor | None,
    score_function: str,
    normalize: bool,
    weight_scale: float,
) -> Tensor:
    from expertmesh.kernels import topk as kernels

    rule = kernels.SelectionRule(score_function, normalize, weight_scale)
    return kernels.choose_backward(logits_TE, ids_TK, rule, d_weights_TK, d_scores_TE)


_choose_experts_backward.register_fake(lambda logits, *rest: logits.new_empty(logits.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)
    ctx.how = inputs[4:7]


def _backward(
    ctx: Any, d_ids: Tensor | None, d_weights: Tensor | None, d_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_weights is None and d_scores is None:
        return (None,) * 8
    d_logits = _choose_experts_backward(*ctx.saved_tensors, d_weights, d_scores, *ctx.how)
    return d_logits, *(None,) * 7


_choose_experts.register_autograd(_backward, setup_context=_save)
refuse_second_derivative(
    _choose_experts_backward,
    "choose_experts with backend='triton'",
    fix="use backend='torch' where one is needed",
)

OPERATOR = torch.ops.expertmesh.choose_experts.default
"""Fused top-k operator, for policies by operator (activation checkpointing)."""
