"""What the statistics count: tokens when they are computed or found, once, however often a step was tried or
repeated."""

import pytest
import torch

import expertmesh as em
from expertmesh.engine.engine import Engine
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 20, 21], [30, 31, 32]]


def gpt(**options):
    config = ModelConfig(
        num_layers=2,
        dim=24,
        num_heads=2,
        vocab_size=64,
        max_seq_len=64,
        tie_embeddings=False,
        moe={"num_experts": (4,), "hidden_dim": 16},
        **options,
    )
    return GPT(config, dtype=torch.float64, seed=1).eval()


def answered(engine, *, n=1, max_tokens=9):
    params = em.SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=True)
    first = engine.generate(PROMPTS[:1], params)
    return [*first, *engine.generate(PROMPTS[1:], params)]


def waiting(engine):
    return answered(engine)


def several(engine):
    return answered(engine, n=3)


def several_of_one_token(engine):
    return answered(engine, n=3, max_tokens=1)


def failing(engine):
    """Some steps raise, as a device may; their sequences are computed again."""
    run, calls = engine._runner.run, []

    def sometimes(step):
        calls.append(step)
        if len(calls) in (2, 4, 9):
            raise RuntimeError
        return run(step)

    engine._runner.run = sometimes
    params = em.SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    found = []
    for prompts in (PROMPTS[:1], PROMPTS[1:]):
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.has_work:
            try:
                found += [one for one in engine.step() if one.finish_reason]
            except RuntimeError:
                continue
    assert len(calls) > 9
    return found


def with_new_weights(engine):
    """All keys are forgotten in the middle of each answer."""
    params = em.SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    found = []
    for prompts in (PROMPTS[:1], PROMPTS[1:]):
        names = [engine.add(prompt, params) for prompt in prompts]
        while engine.has_work:
            found += [one for one in engine.step() if one.finish_reason]
            if engine.stats().num_steps in (3, 5, 12):
                engine.update_weights({})
        assert names
    return found


WAYS = {
    "alone": ({}, waiting),
    "without room": ({"num_blocks": 5}, waiting),
    "in pieces": ({"token_budget": 4}, waiting),
    "in pieces, without room": ({"token_budget": 3, "num_blocks": 5}, waiting),
    "one sequence at a time": ({"max_sequences": 1}, waiting),
    "several answers": ({}, several),
    "several answers, one sequence at a time": ({"max_sequences": 1}, several),
    "several answers, preempted": ({"num_blocks": 6}, several),
    "several answers of one token": ({"max_sequences": 2}, several_of_one_token),
    "failed steps": ({}, failing),
    "failed steps, guesses": ({"num_draft_tokens": 3}, failing),
    "failed steps, in pieces": ({"token_budget": 4}, failing),
    "new weights": ({}, with_new_weights),
    "no known prefixes": ({"prefix_caching": False}, waiting),
}


@pytest.mark.parametrize(("options", "work"), WAYS.values(), ids=WAYS)
def test_each_token_is_counted_once(options, work):
    engine = Engine(gpt(), **{"block_size": 4, "num_blocks": 32} | options)
    found = work(engine)
    stats, n = engine.stats(), len(found) // len(PROMPTS)
    num_prompt = sum(map(len, PROMPTS))
    caches = engine.config.prefix_caching
    assert stats.prefix_queries == caches * num_prompt
    assert stats.prefix_hits <= caches * 8, "of all prompts one begins with two known blocks"
    assert stats.num_prompt_tokens + stats.num_cached_prompt_tokens == n * num_prompt
    assert stats.num_prompt_tokens == num_prompt - stats.prefix_hits, "one answer computes each"
    assert stats.num_generated_tokens == sum(len(one.token_ids) for one in found)
    cached = sum(one.num_cached_tokens for one in found if one.index == 0)
    assert stats.prefix_hits == cached
    assert stats.num_accepted_tokens <= stats.num_draft_tokens


def test_guesses_of_a_failed_step_are_not_counted():
    engine = Engine(gpt(), num_draft_tokens=3)
    engine.add([7] * 12, em.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    engine._scheduler.guess = lambda sequence, most: [7] * most
    run = engine._runner.run
    while not engine._scheduler.running or not engine._scheduler.running[0].new_ids:
        engine.step()
    engine._runner.run = lambda step: 1 / 0
    before = engine.stats()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.stats().num_draft_tokens == before.num_draft_tokens
    engine._runner.run = run
    while engine.has_work:
        engine.step()
    assert engine.stats().num_draft_tokens > 0


def test_a_token_that_cannot_be_drawn_is_not_counted():
    model = gpt()
    with torch.no_grad():
        model.embedding.weight[50] = torch.nan
    engine = Engine(model)
    (bad,) = engine.generate([[50, 6]], em.SamplingParams(max_tokens=4))
    assert (bad.finish_reason, engine.stats().num_generated_tokens) == ("error", 0)
    assert bad.timing.first_token is None
