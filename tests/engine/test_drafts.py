"""Guessed tokens change the number of steps, and nothing else."""

from collections import Counter
from itertools import product

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt

from expertmesh.config.engine import EngineConfig
from expertmesh.engine.drafts import PromptLookup
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError

GUESSES = {
    "nothing": ([], 3, []),
    "one token": ([7], 3, []),
    "nothing twice": ([1, 2, 3, 4], 3, []),
    "one token twice is too little": ([1, 2, 3, 1], 3, []),
    "what followed": ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
    "the last time": ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),
    "the longest end": ([5, 1, 2, 3, 8, 1, 2, 4, 5, 1, 2], 1, [3]),
    "over and over": ([9, 9, 9], 4, [9, 9, 9, 9]),
    "a period": ([1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),
}


@pytest.mark.parametrize(("ids", "most", "expected"), GUESSES.values(), ids=GUESSES)
def test_a_guess_is_what_followed_before(ids, most, expected):
    assert PromptLookup().guess(ids, most) == expected
    growing = PromptLookup()
    for size in range(len(ids)):
        growing.guess(ids[:size], most)
    assert growing.guess(ids, most) == expected


KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.6, "top_p": 0.9, "seed": 3, "n": 2},
    "penalties": {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "ends": {"temperature": 0.8, "seed": 1, "stop_token_ids": (3, 9), "min_tokens": 5},
    "scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
}
CACHES = {
    "roomy": {},
    "small": {"num_blocks": 22, "block_size": 3, "token_budget": 9, "max_sequences": 4},
    "chunks": {"token_budget": 3, "block_size": 2},
}


def answers(engine, params):
    found = engine.generate([*PROMPTS, [1, 2, 3] * 6], params)
    return [(o.prompt_ids, o.index, o.token_ids, o.finish_reason, o.logprobs) for o in found]


def kinds_and_caches():
    """Every kind where sequences are preempted, every cache where tokens are greedy and where they are drawn."""
    for (name, kind), (place, cache) in product(KINDS.items(), CACHES.items()):
        marks = () if place == "small" or name in ("greedy", "drawn") else pytest.mark.exhaustive
        yield pytest.param(kind, cache, marks=marks, id=f"{name}-{place}")


@pytest.mark.parametrize(("kind", "cache"), [*kinds_and_caches()])
def test_answers_are_the_same(kind, cache):
    """To the bit, as the model is batch-invariant: tokens, ends and logprobs."""
    model = gpt(torch.float32, batch_invariant=True)
    params = SamplingParams(**{"max_tokens": 30} | kind)
    plain = Engine(model, deterministic=True, **cache)
    guessing = Engine(model, deterministic=True, num_draft_tokens=4, **cache)
    assert answers(guessing, params) == answers(plain, params)
    stats = guessing.stats()
    assert stats.num_used_blocks == 0 and stats.num_generated_tokens == plain.stats().num_generated_tokens
    if kind == KINDS["greedy"]:
        assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    if cache == {} and kind == KINDS["greedy"]:
        assert stats.num_steps < plain.stats().num_steps


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_greedy_tokens_of_every_router_are_the_same(router):
    model = gpt(moe=router)
    params = SamplingParams(temperature=0, max_tokens=30, return_routed_experts=True)
    plain = Engine(model).generate(PROMPTS, params)
    engine = Engine(model, num_draft_tokens=5)
    for one, other in zip(engine.generate(PROMPTS, params), plain, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.routed_experts, other.routed_experts)
    assert engine.stats().num_accepted_tokens > 0


def test_drawn_tokens_have_the_same_distribution():
    """Each guess is taken as often as it is likely: counts of pairs, where the second may be a guess, equal those
    without to the last one."""
    model = gpt(vocab_size=4, init_std=0.2)
    prompt = [1, 2, 1, 2, 1]
    params = [SamplingParams(seed=seed, max_tokens=4) for seed in range(400)]
    found = []
    for drafts in (0, 3):
        engine = Engine(model, num_draft_tokens=drafts, max_sequences=50)
        found.append(Counter(o.token_ids for o in engine.generate([prompt] * 400, params)))
    assert found[0] == found[1] and len(found[0]) > 20
    assert engine.stats().num_accepted_tokens > 50
    assert engine.stats().num_draft_tokens > engine.stats().num_accepted_tokens


def test_broken_logits_behind_a_guess_end_their_request_alone():
    model = gpt(tie_embeddings=False)
    (whole,) = Engine(model).generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=12))
    with torch.no_grad():
        model.embedding.weight[whole.token_ids[8]] = torch.nan
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = Engine(model).generate([[1, 2, 3] * 4, [5, 6]], params)
    engine = Engine(model, num_draft_tokens=6)
    for one, other in zip(engine.generate([[1, 2, 3] * 4, [5, 6]], params), plain, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    assert engine.stats().num_used_blocks == 0


def test_they_are_off_by_default_and_bounded():
    assert EngineConfig().num_draft_tokens == 0
    for wrong in (-1, 65, "many"):
        with pytest.raises(ConfigError, match="num_draft_tokens"):
            Engine(gpt(), num_draft_tokens=wrong)
