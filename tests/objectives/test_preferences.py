"""Losses of preferences: the papers' formulas in plain Python, measures, and options without effect."""

import math

import pytest
import torch

from expertmesh.config.objective import LOSS_OPTIONS, ObjectiveConfig
from expertmesh.errors import ConfigError
from expertmesh.objectives.preferences import (
    LOSSES,
    LossNumbers,
    PairScores,
    log1mexp,
    pair_measures,
    pair_sums,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def odds(mean):
    """Log odds of a mean log-probability."""
    p = math.exp(mean)
    return math.log(p / (1 - p))


PLAIN = {
    "sigmoid": lambda c, r, b, e, g: (
        -(1 - e) * math.log(sigmoid(b * (c.rho - r.rho))) - e * math.log(sigmoid(-b * (c.rho - r.rho)))
    ),
    "robust": lambda c, r, b, e, g: (
        (-(1 - e) * math.log(sigmoid(b * (c.rho - r.rho))) + e * math.log(sigmoid(-b * (c.rho - r.rho)))) / (1 - 2 * e)
    ),
    "ipo": lambda c, r, b, e, g: (c.rho / c.n - r.rho / r.n - 1 / (2 * b)) ** 2,
    "hinge": lambda c, r, b, e, g: max(0.0, 1 - b * (c.rho - r.rho)),
    "apo_zero": lambda c, r, b, e, g: 1 - sigmoid(b * c.rho) + sigmoid(b * r.rho),
    "apo_down": lambda c, r, b, e, g: sigmoid(b * c.rho) + 1 - sigmoid(b * (c.rho - r.rho)),
    "sigmoid_norm": lambda c, r, b, e, g: -math.log(sigmoid(b * (c.rho / c.n - r.rho / r.n))),
    "simpo": lambda c, r, b, e, g: -math.log(sigmoid(b * (c.lp / c.n - r.lp / r.n) - g)),
    "orpo": lambda c, r, b, e, g: -b * math.log(sigmoid(odds(c.lp / c.n) - odds(r.lp / r.n))),
    "cpo": lambda c, r, b, e, g: -math.log(sigmoid(b * (c.lp - r.lp))),
}
"""Formulas of the losses for one pair."""


class Answer:
    """An answer's numbers."""

    def __init__(self, lp, n, reference):
        self.lp, self.n, self.rho = lp, n, lp - reference


def drawn(count=40):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count, 2), generator=generator).double()
    spread = torch.rand(count, 2, 2, generator=generator, dtype=torch.float64)
    logprobs, reference = (-lengths * (0.01 + 3 * spread[..., i]) for i in range(2))
    return PairScores(logprobs, lengths, reference)


NUMBERS = LossNumbers(beta=0.3, label_smoothing=0.15, gamma=0.7)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_formula(loss):
    answers = drawn()
    found = LOSSES[loss](answers, NUMBERS)
    for i, one in enumerate(found.tolist()):
        sides = [Answer(*(float(x[i, side]) for x in answers)) for side in range(2)]
        expected = PLAIN[loss](*sides, *NUMBERS)
        assert abs(one - expected) <= 1e-10 * max(1.0, abs(expected))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient(loss):
    answers = drawn(6)
    answers.logprobs_B2.requires_grad_()

    def losses(logprobs):
        return LOSSES[loss](answers._replace(logprobs_B2=logprobs), NUMBERS)

    assert torch.autograd.gradcheck(losses, (answers.logprobs_B2,))


def test_every_loss_has_options_and_a_formula():
    assert set(LOSSES) == set(LOSS_OPTIONS) == set(PLAIN)


def test_losses_read_what_their_options_say():
    """An option that a loss does not read changes nothing, and one that it reads changes it."""
    answers, plain = drawn(), LossNumbers(0.3)
    others = {
        "label_smoothing": (answers, plain._replace(label_smoothing=0.2)),
        "gamma": (answers, plain._replace(gamma=0.5)),
        "reference": (answers._replace(reference_B2=answers.reference_B2 * 0.5), plain),
    }
    for loss, function in LOSSES.items():
        read = {name for name, given in others.items() if not torch.equal(function(*given), function(answers, plain))}
        assert read == set(LOSS_OPTIONS[loss].reads), loss


@pytest.mark.parametrize("x", [-1e-300, -1e-12, -0.5, -0.6931, -0.6932, -5.0, -700.0])
def test_log1mexp(x):
    wide = torch.tensor(x, dtype=torch.float64)
    expected = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    assert math.isclose(float(log1mexp(wide)), expected, rel_tol=1e-12)


def test_a_certain_answer_has_a_finite_gradient():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    answers = PairScores(logprobs, torch.ones(1, 2), torch.zeros(1, 2))
    LOSSES["orpo"](answers, LossNumbers(0.1)).sum().backward()
    assert logprobs.grad.isfinite().all()


def test_measures_are_means_over_pairs():
    answers = drawn(5)
    losses_B = LOSSES["sigmoid"](answers, NUMBERS)
    sums = pair_sums(answers, answers.lengths_B2 * 2.0, losses_B, NUMBERS, loss="sigmoid")
    found = pair_measures({k: float(v) for k, v in sums.items()} | {"items": 5}, sft_weight=0.5)
    rho = (answers.logprobs_B2 - answers.reference_B2).tolist()
    nll = -float(answers.logprobs_B2[:, 0].sum() / answers.lengths_B2[:, 0].sum())
    assert math.isclose(found["loss"], float(losses_B.mean()) + 0.5 * nll)
    assert found["accuracy"] == sum(c > r for c, r in rho) / 5
    assert math.isclose(found["margin"], 0.3 * sum(c - r for c, r in rho) / 5)
    assert math.isclose(found["entropy"], 2.0)


MISTAKES = {
    "no preferences": ({"loss": "ipo"}, "objective.loss=ipo: has no effect with"),
    "no margin": ({"name": "dpo", "gamma": 1.0}, "gamma=1.0: has no effect with"),
    "no wrong pairs": (
        {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1},
        "label_smoothing=0.1: has no effect with",
    ),
    "half are wrong": ({"name": "dpo", "label_smoothing": 0.5}, "label_smoothing=0.5"),
    "robust to nothing": ({"name": "dpo", "loss": "robust"}, "label_smoothing=0.0: must be above"),
    "no reference": (
        {"name": "dpo", "loss": "simpo", "reference": "none"},
        "reference=none: has no effect with",
    ),
    "beta": ({"name": "dpo", "beta": 0.0}, "beta=0.0"),
    "a loss": ({"name": "dpo", "loss": "sppo"}, "loss=sppo"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake):
    values, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        ObjectiveConfig(**values)
    assert said.removeprefix("objective.") in str(error.value) and "\n" not in str(error.value)
