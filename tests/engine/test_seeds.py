"""One seed for many prompts: independent draws, the same ones however the prompts are computed."""

import pytest
import torch

import expertmesh as em
from expertmesh.engine.engine import Engine
from expertmesh.engine.lockstep import Lockstep
from expertmesh.engine.texts import continue_prompts
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT


def flat_gpt(**moe):
    """A model for which all tokens are about as likely after any prompt, so that draws show their random numbers."""
    config = ModelConfig(
        num_layers=1,
        dim=16,
        num_heads=2,
        vocab_size=8,
        max_seq_len=32,
        init_std=1e-6,
        moe={"num_experts": (2,), "hidden_dim": 8, **moe},
    )
    return GPT(config, dtype=torch.float64, seed=1).eval()


def by_engine(model, prompts, params):
    return Engine(model, num_blocks=64).generate(prompts, params)


def in_lockstep(model, prompts, params):
    return [one for _, (one,) in Lockstep(model, batch_size=7).as_they_end(prompts, params)]


def continued(model, prompts, params):
    return continue_prompts(model, prompts, params, batch_size=9)


WAYS = {"engine": by_engine, "lockstep": in_lockstep, "continued": continued}
MANY = [[1, 2, 3]] * 400


def drawn(outputs):
    return [one.token_ids for one in outputs]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_equal_prompts_of_a_call_are_drawn_independently(way):
    params = em.SamplingParams(seed=7, max_tokens=1, ignore_eos=True)
    found = torch.tensor(drawn(way(flat_gpt(), MANY, params)))[:, 0].bincount(minlength=8)
    expected = len(MANY) / 8
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 30, "7 degrees of freedom: one in 10,000 is above 29.9; seeds are fixed"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_first_prompt_and_lists_of_parameters_keep_their_seeds(way):
    model, params = flat_gpt(), em.SamplingParams(seed=7, max_tokens=9, ignore_eos=True)
    (alone,) = drawn(way(model, [MANY[0]], params))
    assert drawn(way(model, MANY[:5], params))[0] == alone
    assert drawn(way(model, MANY[:5], params)) == drawn(way(model, MANY[:20], params))[:5]
    if way is not continued:
        assert drawn(way(model, MANY[:3], [params] * 3)) == [alone] * 3
        assert drawn(way(model, MANY[:3], (params,) * 3)) == [alone] * 3


def test_no_prompt_has_the_numbers_of_another_seed_answer_or_prompt():
    model, seen = flat_gpt(), []
    for seed in (0, 1, 2, 3, 2**31, 2**63 - 2, 2**63 - 1):
        params = em.SamplingParams(seed=seed, n=2, max_tokens=16, ignore_eos=True)
        seen += drawn(by_engine(model, MANY[:20], params))
    assert len(set(seen)) == len(seen) == 7 * 40, "16 tokens of 8 are 48 bits"


def test_all_ways_draw_the_same():
    params = em.SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    model = flat_gpt()
    by_way = {name: drawn(way(model, MANY[:12], params)) for name, way in WAYS.items()}
    for options in ({"token_budget": 3}, {"max_sequences": 2}, {"num_blocks": 2}):
        one = Engine(model, **{"num_blocks": 64, "block_size": 16} | options)
        by_way[str(options)] = drawn(one.generate(MANY[:12], params))
    first = by_way.pop("engine")
    assert all(other == first for other in by_way.values()), by_way.keys()


def test_without_a_seed_each_prompt_has_a_fresh_one():
    torch.manual_seed(0)
    found = drawn(by_engine(flat_gpt(), MANY[:20], em.SamplingParams(max_tokens=16)))
    assert len(set(found)) == 20
