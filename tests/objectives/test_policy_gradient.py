"""Losses of groups of answers: every option against a loop over answers and tokens in plain FP64, with gradients."""

import math
from statistics import mean, stdev

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64

from expertmesh.config.rl import RLConfig
from expertmesh.errors import ConfigError
from expertmesh.objectives import policy_gradient

B, G = 3, 4
LENGTHS = (3, 1, 5, 2, 4, 1, 1, 6, 2, 2, 3, 5)
OPTIONS = {
    "grpo": {"average": "sequence"},
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {"scale": "none", "average": "constant", "max_tokens": 6},
    "dual clip": {"dual_clip": 3.0, "clip_low": 0.1},
    "gspo": {"ratio": "sequence", "average": "sequence", "clip_low": 0.05, "clip_high": 0.06},
    "cispo": {"loss": "cispo", "cispo_cap": 1.1},
    "cispo of answers": {"loss": "cispo", "cispo_cap": 1.1, "ratio": "sequence"},
    "rloo": {"advantage": "loo", "scale": "none", "loss": "reinforce", "average": "sequence"},
    "batch scale": {"scale": "batch"},
}
CORRECTIONS = {
    "none": {"exact": False},
    "token_truncate": {"exact": False, "correction": "token_truncate", "correction_cap": 1.05},
    "sequence_mask": {"exact": False, "correction": "sequence_mask", "correction_cap": 1.3},
}


def given(spread=0.4):
    generator = torch.Generator().manual_seed(1)
    num = sum(LENGTHS)
    draw = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    rewards_BG = draw(B, G).round()
    rewards_BG[1] = 0.1
    old_R = -draw(num).abs() - 0.1
    new_R, sampled_R = old_R + spread * draw(num), old_R + spread * draw(num)
    return rewards_BG, old_R, new_R, sampled_R


def drawn_of(old_R, rewards_BG, rl):
    length_A = torch.tensor(LENGTHS, dtype=torch.float64)
    answer_R = torch.arange(B * G).repeat_interleave(torch.tensor(LENGTHS))
    advantage_A = policy_gradient.advantages(rewards_BG, rl).flatten()
    return policy_gradient.Drawn(old_R, answer_R, advantage_A, length_A)


def plain_advantages(rewards, rl):
    found = []
    everything = [r for group in rewards for r in group]
    for group in rewards:
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            base = mean(others) if rl.advantage == "loo" else mean(group)
            of = {"group": group, "batch": everything, "none": None}[rl.scale]
            scale = 1.0 if of is None else stdev(of) + 1e-4
            found.append(0.0 if len({*group}) == 1 else (reward - base) / scale)
    return found


def plain_loss(new_R, old, sampled, rewards, rl):
    """Average loss of the batch by loops; a tensor of new_R's graph."""
    advantages, at, sums = plain_advantages(rewards, rl), 0, []
    for advantage, length in zip(advantages, LENGTHS, strict=True):
        new, q = new_R[at : at + length], old[at : at + length]
        gap = sum(o - s for o, s in zip(q, sampled[at : at + length], strict=True))
        whole = torch.exp(sum(new[t] - q[t] for t in range(length)) / length)
        losses = []
        for t in range(length):
            w = whole if rl.ratio == "sequence" else torch.exp(new[t] - q[t])
            if rl.loss == "reinforce":
                loss = -advantage * new[t]
            elif rl.loss == "cispo":
                loss = -min(w.item(), rl.cispo_cap) * advantage * new[t]
            else:
                low, high = 1 - rl.clip_low, 1 + rl.clip_high
                inside = min(max(w.item(), low), high)
                kept = w if inside == w.item() else inside
                bound = rl.dual_clip or math.inf
                free = w if w.item() <= bound else bound
                a, b = free * advantage, kept * advantage
                is_less = min(w.item(), bound) * advantage <= inside * advantage
                loss = -(a if is_less else b)
            o, s = q[t], sampled[at + t]
            if rl.correction == "token_truncate":
                loss = loss * min(math.exp(o - s), rl.correction_cap)
            if rl.correction == "sequence_mask":
                c = rl.correction_cap
                loss = loss * float(1 / c <= math.exp(gap) <= c)
            losses.append(loss)
        sums.append(sum(losses) / (length if rl.average == "sequence" else 1))
        at += length
    count = sum(LENGTHS) if rl.average == "token" else B * G
    return sum(sums) / count / (rl.max_tokens if rl.average == "constant" else 1)


def with_gradient(function, new_R):
    leaf = new_R.clone().requires_grad_()
    loss = torch.as_tensor(function(leaf))
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula_by_loops(name, correction):
    rl = RLConfig(**{**OPTIONS[name], **CORRECTIONS[correction]})
    rewards_BG, old_R, new_R, sampled_R = given()
    drawn = drawn_of(old_R, rewards_BG, rl)

    def ours(leaf):
        loss_R = policy_gradient.policy_losses(leaf, drawn, rl)
        loss_R = loss_R * policy_gradient.corrections(old_R, sampled_R, drawn, rl)
        count = policy_gradient.num_items(len(leaf), B * G, rl)
        return policy_gradient.summed(loss_R, drawn, rl) / count

    lists = [x.tolist() for x in (old_R, sampled_R, rewards_BG)]
    found = with_gradient(ours, new_R)
    expected = with_gradient(lambda leaf: plain_loss(leaf, *lists, rl), new_R)
    for one, other, what in zip(found, expected, ("loss", "gradient"), strict=True):
        assert_close_fp64(one, other, what=what, scale=1.0)
    assert found[1].abs().max() > 0


def test_the_divergence_by_loops():
    """k3 of drawn tokens; 0 with a gradient of 0 where policy and reference are equal."""
    _, reference_R, new_R, _ = given()
    new_R = new_R.clone()
    new_R[0] = reference_R[0]
    ratios = (torch.exp(r - new_R[i]) for i, r in enumerate(reference_R.tolist()))
    assert_close_fp64(
        policy_gradient.kl_estimates(new_R, reference_R),
        torch.stack([ratio - 1 - torch.log(ratio) for ratio in ratios]),
        what="estimates",
        scale=1.0,
    )
    estimates_R, gradient = with_gradient(lambda leaf: policy_gradient.kl_estimates(leaf, reference_R).sum(), new_R)
    assert estimates_R > 0 and gradient[0] == 0 and bool(gradient[1:].all())


@pytest.mark.parametrize("name", OPTIONS)
def test_clipped_tokens_have_no_gradient(name):
    rl = RLConfig(**OPTIONS[name])
    rewards_BG, old_R, new_R, _ = given()
    drawn = drawn_of(old_R, rewards_BG, rl)
    _, gradient = with_gradient(lambda leaf: policy_gradient.policy_losses(leaf, drawn, rl).sum(), new_R)
    clipped = policy_gradient.is_clipped(new_R, drawn, rl)
    assert bool(clipped.any()) == (rl.loss == "clip")
    assert not gradient[clipped].any()


def test_equal_rewards_teach_exactly_nothing():
    """Their rounded mean is not their value."""
    rewards_BG = torch.tensor([[0.1] * 7, [0.1] * 6 + [0.2]], dtype=torch.float32)
    assert float((rewards_BG[0] - rewards_BG[0].mean()).abs().max()) > 0
    found = policy_gradient.advantages(rewards_BG, RLConfig())
    assert not found[0].any() and found[1].all()


def test_the_penalty_of_long_answers_rises_over_the_last_tokens():
    rl = RLConfig(max_tokens=10, soft_length=4)
    found = policy_gradient.soft_length_penalty(torch.tensor([1, 6, 7, 9, 10]), rl)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


MISTAKES = {
    "idle cap": ({"cispo_cap": 3.0}, "cispo_cap=3.0: has no effect"),
    "idle clip": ({"loss": "cispo", "clip_high": 0.3}, "clip_high=0.3: has no effect"),
    "idle ratio": ({"loss": "reinforce", "ratio": "sequence"}, "ratio=sequence: has no effect"),
    "exact replays": ({"replay_routing": False}, "replay_routing=False: has no effect"),
    "exact corrects": ({"correction": "sequence_mask"}, "correction=sequence_mask: has no effect"),
    "a group of one": ({"group": 1}, "group=1"),
    "a long tail": ({"max_tokens": 4, "soft_length": 5}, "soft_length=5: must be at most"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake):
    values, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        RLConfig(**values)
    assert said in str(error.value) and "\n" not in str(error.value)
