"""The distribution that tokens are drawn from, and the drawing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.numerics import assert_close_fp64

from expertmesh.ops.sampling import SamplingBatch, draw, token_probs, uniform_of

VOCAB = 7
LOGITS = torch.tensor([[0.3, 2.0, -1.0, 1.5, 2.0, -torch.inf, 0.0]], dtype=torch.float64)


def batch_of(rows=1, *, temperature=1.0, top_k=None, top_p=None, min_p=0.0, seed=0):
    """All rows alike, at positions 0, 1, 2, ..."""
    whole = {"dtype": torch.int64}
    return SamplingBatch(
        temperature_R=torch.full((rows,), temperature, dtype=torch.float64),
        top_k_R=torch.full((rows,), 2**31 if top_k is None else top_k, **whole),
        top_p_R=torch.full((rows,), 1.0 if top_p is None else top_p, dtype=torch.float64),
        min_p_R=torch.full((rows,), min_p, dtype=torch.float64),
        seed_R=torch.full((rows,), seed, **whole),
        answer_R=torch.zeros(rows, **whole),
        position_R=torch.arange(rows),
        all_greedy=temperature == 0,
        none_filters=top_k is None and top_p is None and not min_p,
    )


def plain_probs(logits, *, temperature, top_k, top_p, min_p):
    """The definition, one token at a time."""
    probs = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda i: (-float(probs[i]), i))[:top_k]
    probs = probs / sum(float(probs[i]) for i in order)
    kept, total = [], 0.0
    for i in order:
        if (top_p is not None and total >= top_p) or probs[i] < min_p * probs[order[0]]:
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
    min_p=st.sampled_from([0.0, 0.013, 0.37]),
)
def test_probabilities_follow_their_definition(logits, temperature, top_k, top_p, min_p):
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    values = [logit / 7 for logit in logits]
    ours = token_probs(torch.tensor([values], dtype=torch.float64), batch_of(**options))[0]
    assert_close_fp64(ours / ours.sum(), plain_probs(values, **options), what="probabilities")


def test_impossible_tokens_stay_impossible():
    for top_k in (None, 3, VOCAB):
        assert token_probs(LOGITS, batch_of(top_k=top_k, temperature=100.0))[0, 5] == 0


def test_drawing_follows_the_distribution():
    """Chi-square of fixed draws against the exact probabilities."""
    count, options = 20_000, {"temperature": 1.3, "top_k": 5, "top_p": 0.95}
    chosen = draw(LOGITS.expand(count, -1), batch_of(count, seed=11, **options))
    expected = token_probs(LOGITS, batch_of(**options))[0]
    expected = expected / expected.sum() * count
    found = torch.bincount(chosen, minlength=VOCAB).double()
    live = expected > 0
    assert found[~live].sum() == 0 and int(live.sum()) == 5
    assert float(((found - expected)[live] ** 2 / expected[live]).sum()) < 20  # four degrees of freedom


def test_greedy_takes_the_first_of_the_most_likely():
    assert draw(LOGITS, batch_of(temperature=0)).tolist() == [1]
    assert set(draw(LOGITS.expand(50, -1), batch_of(50, top_k=1)).tolist()) == {1}


def test_numbers_are_those_of_seed_answer_and_position():
    def numbers(seed, answer, position):
        parts = (torch.tensor([part]) for part in (seed, answer, position))
        return float(uniform_of(*parts))

    cases = [(5, 0, 0), (5, 0, 1), (5, 1, 0), (6, 0, 0), (5 + 2**40, 0, 0), (5, 0, 2**33)]
    found = [numbers(*case) for case in cases]
    assert len(set(found)) == len(cases) and all(0 <= one < 1 for one in found)
    assert found == [numbers(*case) for case in cases]


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e30, 1e300])
def test_no_temperature_breaks_the_distribution(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e30, 0.0, 1e30]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):
        probs = token_probs(logits, batch_of(2, temperature=temperature, **options))
        assert torch.isfinite(probs).all()
        if temperature < 1:
            assert probs.argmax(-1).tolist() == [1, 2]
