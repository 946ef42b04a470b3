"""Losses of preferences between two answers, from the answers' log-probabilities.

lp is an answer's log-probability, the sum over its tokens and its end, n their number, R the reference's
log-probability, and rho = lp - R; c is the chosen answer and r the rejected one; d = rho_c - rho_r; b is
`objective.beta`, e `objective.label_smoothing`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PairScores(NamedTuple):
    """Scores of pairs of answers; index 0 of the last axis is the chosen answer."""

    logprobs_B2: Tensor  # (B, 2) lp, log-probabilities under the model, FP32 or FP64
    lengths_B2: Tensor  # (B, 2) n, numbers of tokens
    reference_B2: Tensor  # (B, 2) R, log-probabilities under the reference; zeros without one

    @property
    def ratios(self) -> Tensor:
        """(B, 2) rho."""
        return self.logprobs_B2 - self.reference_B2

    @property
    def means(self) -> Tensor:
        """(B, 2) rho / n."""
        return self.ratios / self.lengths_B2


class LossNumbers(NamedTuple):
    """Numbers of a preference loss."""

    beta: float  # b
    label_smoothing: float = 0.0  # e, in [0, 0.5)
    gamma: float = 0.0  # margin of SimPO


PairLoss = Callable[[PairScores, LossNumbers], Tensor]
"""Loss (B,) of each pair."""


def _difference(x_B2: Tensor) -> Tensor:
    return x_B2[:, 0] - x_B2[:, 1]


def _smoothed(x_B: Tensor, e: float, sign: float) -> Tensor:
    """-(1 - e) log sigmoid(x) - sign e log sigmoid(-x)."""
    loss_B = -(1.0 - e) * F.logsigmoid(x_B)
    return loss_B - sign * e * F.logsigmoid(-x_B) if e else loss_B


def sigmoid(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """-(1 - e) log sigmoid(b d) - e log sigmoid(-b d): DPO (Rafailov et al. 2023, eq. 7), with smoothing cDPO (Mitchell
    2023)."""
    return _smoothed(numbers.beta * _difference(answers.ratios), numbers.label_smoothing, 1.0)


def robust(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """[-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)] / (1 - 2 e): Chowdhury et al. 2024, eq. 9."""
    e = numbers.label_smoothing
    return _smoothed(numbers.beta * _difference(answers.ratios), e, -1.0) / (1.0 - 2.0 * e)


def ipo(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """(rho_c / n_c - rho_r / n_r - 1 / (2 b))^2: Azar et al. 2023, eq. 17, with lengths divided out."""
    return (_difference(answers.means) - 0.5 / numbers.beta).square()


def hinge(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """max(0, 1 - b d): SLiC (Zhao et al. 2023)."""
    return torch.relu(1.0 - numbers.beta * _difference(answers.ratios))


def apo_zero(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """1 - sigmoid(b rho_c) + sigmoid(b rho_r): D'Oosterlinck et al. 2024, eq. 7."""
    s_B2 = torch.sigmoid(numbers.beta * answers.ratios)
    return 1.0 - _difference(s_B2)


def apo_down(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """sigmoid(b rho_c) + 1 - sigmoid(b d): D'Oosterlinck et al. 2024, eq. 8."""
    b, ratios_B2 = numbers.beta, answers.ratios
    return torch.sigmoid(b * ratios_B2[:, 0]) + 1.0 - torch.sigmoid(b * _difference(ratios_B2))


def sigmoid_norm(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """-log sigmoid(b (rho_c / n_c - rho_r / n_r)): DPO of rewards per token."""
    return -F.logsigmoid(numbers.beta * _difference(answers.means))


def simpo(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """-log sigmoid(b (lp_c / n_c - lp_r / n_r) - gamma): Meng et al. 2024, eq. 6."""
    means_B2 = answers.logprobs_B2 / answers.lengths_B2
    return -F.logsigmoid(numbers.beta * _difference(means_B2) - numbers.gamma)


def orpo(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """-b log sigmoid(o), o = log(p_c / (1 - p_c)) - log(p_r / (1 - p_r)), p = exp(lp / n): Hong et al. 2024, eq. 7."""
    means_B2 = answers.logprobs_B2 / answers.lengths_B2
    odds_B2 = means_B2 - log1mexp(means_B2)
    return -numbers.beta * F.logsigmoid(_difference(odds_B2))


def cpo(answers: PairScores, numbers: LossNumbers) -> Tensor:
    """-log sigmoid(b (lp_c - lp_r)): Xu et al. 2024, eq. 3."""
    return -F.logsigmoid(numbers.beta * _difference(answers.logprobs_B2))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate near 0 and far from it; gradients are finite also at 0, where it is taken
    just below."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    of_near = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, of_near, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


LOSSES: Mapping[str, PairLoss] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            *(sigmoid, robust, ipo, hinge, apo_zero, apo_down, sigmoid_norm),
            *(simpo, orpo, cpo),
        )
    }
)
"""Losses of pairs by `objective.loss`; `expertmesh.config.objective.LOSS_OPTIONS` has their options."""
_OF_MEANS = ("simpo", "orpo")
"""Losses without a reference that compare answers by their log-probability per token."""


def pair_sums(
    answers: PairScores, entropies_B2: Tensor, losses_B: Tensor, numbers: LossNumbers, *, loss: str
) -> dict[str, Tensor]:
    """Sums over pairs of a step's measures by name.

    Args:
        entropies_B2: (B, 2) sums of the tokens' entropies in nats.
        losses_B: (B,) losses of the pairs.
        loss: its name; the reward of an answer is b rho, and b lp / n for simpo and orpo.

    Returns:
        Sums of: the preference loss; pairs whose chosen answer has the larger reward; rewards and log-probabilities of
            both
        answers; entropies; and the numbers of tokens.
    """
    with torch.no_grad():
        compared_B2 = answers.means if loss in _OF_MEANS else answers.ratios
        rewards_B2 = numbers.beta * compared_B2
        reward_c, reward_r = rewards_B2.sum(0).unbind()
        logp_c, logp_r = answers.logprobs_B2.sum(0).unbind()
        return {
            "preference": losses_B.sum(),
            "accuracy": (_difference(rewards_B2) > 0).sum(),
            "reward_chosen": reward_c,
            "reward_rejected": reward_r,
            "logp_chosen": logp_c,
            "logp_rejected": logp_r,
            "entropy": entropies_B2.sum(),
            "chosen_tokens": answers.lengths_B2[:, 0].sum(),
            "tokens": answers.lengths_B2.sum(),
        }


def pair_measures(sums: Mapping[str, float], *, sft_weight: float) -> dict[str, float]:
    """Means of `pair_sums` with their number of pairs, "items": the loss, with the chosen answers' cross-entropy per
    token, first."""
    items, tokens = sums["items"], sums["chosen_tokens"]
    per_pair = {
        name: sums[name] / items
        for name in ("accuracy", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
    }
    return {
        "loss": sums["preference"] / items - sft_weight * sums["logp_chosen"] / tokens,
        **per_pair,
        "margin": per_pair["reward_chosen"] - per_pair["reward_rejected"],
        "entropy": sums["entropy"] / sums["tokens"],
    }
