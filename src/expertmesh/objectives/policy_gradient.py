"""Policy-gradient losses of groups of answers: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and RLOO as options of one function.

Tokens are flat: rows R are the tokens of all answers, and `answer_R` says which answer each belongs to. Groups are the
G answers to a prompt, neighbours among the B * G answers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.config.rl import RLConfig

STD_EPS = 1e-4
"""Number added to standard deviations, as in TRL."""


def advantages(rewards_BG: Tensor, rl: RLConfig) -> Tensor:
    """Advantages (B, G) of rewards (B, G), in their dtype.

    r - mean(group), Shao et al. 2024 (arXiv 2402.03300), eq. 3; with `advantage` loo, r - mean of the group's others
    (RLOO, Ahmadian et al. 2024, arXiv 2402.14740), which is G / (G - 1) times as much. Divided by the unbiased standard
    deviation of the group's rewards, of the whole batch's (`scale` batch, arXiv 2508.08221), or by nothing (Dr. GRPO,
    Liu et al. 2025, arXiv 2503.20783). Equal rewards have advantages of exactly 0.
    """
    G = rewards_BG.shape[1]
    found = rewards_BG - rewards_BG.mean(1, keepdim=True)
    if rl.advantage == "loo":
        found = found * (G / (G - 1))
    if rl.scale == "group":
        found = found / (rewards_BG.std(1, keepdim=True) + STD_EPS)
    elif rl.scale == "batch":
        found = found / (rewards_BG.std() + STD_EPS)
    # a rounded mean of equal rewards is not their value
    return found.where(~equal_groups(rewards_BG)[:, None], 0.0)


def equal_groups(rewards_BG: Tensor) -> Tensor:
    """Whether all rewards of a group are equal, (B,) bool: such groups teach nothing."""
    return (rewards_BG == rewards_BG[:, :1]).all(1)


def soft_length_penalty(lengths: Tensor, rl: RLConfig) -> Tensor:
    """Penalties in -1 ... 0 of answers of these numbers of tokens (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13),
    FP64."""
    if rl.soft_length is None:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    begin = rl.max_tokens - rl.soft_length
    return -((lengths - begin).double() / rl.soft_length).clamp(0, 1)


class Drawn(NamedTuple):
    """Tokens that were drawn, with what is known of them before the update."""

    old_R: Tensor  # (R,) log-probabilities of the policy before the first update
    answer_R: Tensor  # (R,) int64 answer of each token
    advantage_A: Tensor  # (A,) advantage of each answer
    length_A: Tensor  # (A,) tokens of each answer, in the floating dtype of the losses

    def sums(self, x_R: Tensor) -> Tensor:
        """Sum (A,) over the tokens of each answer."""
        return x_R.new_zeros(len(self.length_A)).index_add(0, self.answer_R, x_R)


def ratios(logprob_R: Tensor, drawn: Drawn, rl: RLConfig) -> Tensor:
    """Importance ratios (R,) of the policy to the one before the first update.

    exp(new - old) per token, or its geometric mean over the answer (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7).
    """
    log_R = logprob_R - drawn.old_R
    if rl.ratio == "sequence":
        log_R = (drawn.sums(log_R) / drawn.length_A)[drawn.answer_R]
    return log_R.exp()


def policy_losses(logprob_R: Tensor, drawn: Drawn, rl: RLConfig) -> Tensor:
    """Loss of every token (R,), before any average.

    * clip: -min(w A, clip(w, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv 1707.06347, eq. 7); with `dual_clip` c,
      w is at most c where A < 0 (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    * cispo: -stop_gradient(min(w, cap)) A log p (MiniMax-M1, arXiv 2506.13585, eq. 4).
    * reinforce: -A log p (Williams 1992).
    """
    advantage_R = drawn.advantage_A[drawn.answer_R]
    if rl.loss == "reinforce":
        return -advantage_R * logprob_R
    ratio_R = ratios(logprob_R, drawn, rl)
    if rl.loss == "cispo":
        return -ratio_R.detach().clamp(max=rl.cispo_cap) * advantage_R * logprob_R
    clipped_R = ratio_R.clamp(1 - rl.clip_low, 1 + rl.clip_high)
    if rl.dual_clip is not None:
        ratio_R = ratio_R.clamp(max=rl.dual_clip)
    return -torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R)


def kl_estimates(logprob_R: Tensor, reference_R: Tensor) -> Tensor:
    """Estimates (R,) of the KL divergence to the reference from drawn tokens: r - 1 - log r, r = p_reference / p
    (Schulman 2020, k3).

    They are 0 or above, and 0 where both are equal.
    """
    log_R = reference_R - logprob_R
    return torch.expm1(log_R) - log_R


def with_penalties(loss_R: Tensor, entropies_R: Tensor, kl_R: Tensor | None, rl: RLConfig) -> Tensor:
    """Losses of tokens (R,) plus `kl_beta` times the KL divergence, minus `entropy_coef` times the entropy.

    Args:
        loss_R: (R,) losses of the tokens.
        entropies_R: (R,) entropies in nats, with gradients.
        kl_R: (R,) of `kl_estimates`, with gradients; None: `kl_beta` is 0.
    """
    if rl.kl_beta:
        assert kl_R is not None
        loss_R = loss_R + rl.kl_beta * kl_R
    return loss_R - rl.entropy_coef * entropies_R if rl.entropy_coef else loss_R


def is_clipped(logprob_R: Tensor, drawn: Drawn, rl: RLConfig) -> Tensor:
    """Whether clipping takes a token's gradient away, (R,) bool."""
    ratio_R, advantage_R = ratios(logprob_R, drawn, rl), drawn.advantage_A[drawn.answer_R]
    if rl.loss != "clip":
        return torch.zeros_like(ratio_R, dtype=torch.bool)
    above = (ratio_R > 1 + rl.clip_high) & (advantage_R > 0)
    return above | ((ratio_R < 1 - rl.clip_low) & (advantage_R < 0))


def summed(loss_R: Tensor, drawn: Drawn, rl: RLConfig) -> Tensor:
    """Scalar whose quotient by `num_items` is the average loss: DAPO's token mean, GRPO's mean of means, or Dr. GRPO's
    constant."""
    if rl.average == "sequence":
        return (loss_R / drawn.length_A[drawn.answer_R]).sum()
    return loss_R.sum() / (rl.max_tokens if rl.average == "constant" else 1)


def num_items(num_tokens: int, num_answers: int, rl: RLConfig) -> int:
    """Number of items over which `summed` is averaged: learned tokens, or answers."""
    return num_tokens if rl.average == "token" else num_answers


def corrections(old_R: Tensor, sampled_R: Tensor, drawn: Drawn, rl: RLConfig) -> Tensor:
    """Weights (R,) of tokens that correct the mismatch of rollouts and training.

    token_truncate: min(p_train / p_rollout, C) (Yao et al. 2025, truncated importance sampling); sequence_mask: 1 where
    the product over the answer is in 1/C ... C, else 0; none: 1.

    Args:
        old_R: (R,) log-probabilities that training computes before the first update.
        sampled_R: (R,) log-probabilities with which rollouts drew the tokens.
    """
    log_R = old_R - sampled_R
    if rl.correction == "token_truncate":
        return log_R.exp().clamp(max=rl.correction_cap)
    if rl.correction == "sequence_mask":
        weight_A = drawn.sums(log_R).exp()
        kept_A = (weight_A <= rl.correction_cap) & (weight_A >= 1 / rl.correction_cap)
        return kept_A.to(log_R)[drawn.answer_R]
    return torch.ones_like(log_R)
