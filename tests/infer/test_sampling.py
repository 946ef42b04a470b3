"""The distribution that tokens are drawn from, and the drawing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.numerics import assert_close_fp64

from expertmesh.errors import ConfigError
from expertmesh.infer.sampling import (
    Sampling,
    choose,
    draw_uniform,
    next_token_probs,
    sequence_generators,
)

VOCAB = 7
LOGITS = torch.tensor([[0.3, 2.0, -1.0, 1.5, 2.0, -torch.inf, 0.0]], dtype=torch.float64)


def plain_probs(
    logits: list[float], *, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """The definition, one token at a time."""
    probs = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda i: (-float(probs[i]), i))[:top_k]
    probs = probs / sum(float(probs[i]) for i in order)
    kept, total = [], 0.0
    for i in order:
        if top_p is not None and total >= top_p:
            break
        kept.append(i)
        total += float(probs[i])
    result = torch.zeros(len(logits), dtype=torch.float64)
    for i in kept:
        result[i] = probs[i] / total
    return result


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    logits=st.lists(st.integers(-30, 30), min_size=1, max_size=9),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([None, 1e-9, 0.31, 0.72, 0.97, 1.0]),
)
def test_probabilities_follow_their_definition(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    values = [logit / 7 for logit in logits]
    ours = next_token_probs(torch.tensor([values], dtype=torch.float64), sampling)[0]
    plain = plain_probs(values, temperature=temperature, top_k=top_k, top_p=top_p)
    assert_close_fp64(ours, plain, what="probabilities")


def test_impossible_tokens_stay_impossible() -> None:
    for top_k in (None, 3, VOCAB):
        assert next_token_probs(LOGITS, Sampling(top_k=top_k, temperature=100.0))[0, 5] == 0


def test_choosing_inverts_the_cumulative_distribution() -> None:
    """Evenly spaced numbers must land on every token as often as its probability says, to one."""
    sampling = Sampling(temperature=1.3, top_k=5, top_p=0.95)
    count = 10_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = choose(LOGITS.expand(count, -1), sampling, uniform_B=uniform)
    frequency = torch.bincount(chosen, minlength=VOCAB).double()
    expected = next_token_probs(LOGITS, sampling)[0] * count
    assert (frequency - expected).abs().max() <= 1


def test_extreme_numbers_choose_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert choose(logits, Sampling(), uniform_B=uniform).tolist() == [1, 2]


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    assert choose(LOGITS, Sampling(greedy=True)).tolist() == [1]
    assert choose(LOGITS, Sampling(top_k=1), uniform_B=torch.tensor([0.99])).tolist() == [1]


def test_sequences_have_their_own_numbers() -> None:
    few = [draw_uniform(sequence_generators(5, 2)) for _ in range(2)]
    assert torch.equal(few[0], few[1])
    many = draw_uniform(sequence_generators(5, 4))
    assert torch.equal(many[:2], few[0])
    assert len(set(many.tolist())) == 4
    assert not torch.equal(draw_uniform(sequence_generators(6, 1)), many[:1])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"^{name}={value}: .*; "):
        Sampling(**options)


def test_temperature_0_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampling(temperature=0).greedy
    assert choose(logits, Sampling(temperature=0)).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-300, 1e300])
def test_no_temperature_breaks_the_distribution(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e30, 0.0, 1e30]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):
        probs = next_token_probs(logits, Sampling(temperature=temperature, **options))
        assert torch.isfinite(probs).all()
        if temperature < 1:
            assert probs.argmax(-1).tolist() == [1, 2] and probs.amax(-1).tolist() == [1, 1]
