"""Times of answers: in their order, and with every preemption; no test says how long anything took."""

import time

import pytest
from tests.engine.test_engine import CACHES, GREEDY, PROMPTS, gpt

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_times_follow_each_other(cache):
    engine, before = Engine(gpt(), **cache), time.perf_counter()
    answers = engine.generate(PROMPTS, GREEDY)
    after = time.perf_counter()
    for answer in answers:
        timing = answer.timing
        assert before < timing.added < timing.admitted < timing.first_token < timing.last_token
        assert timing.last_token < after
    preempted = sum(answer.timing.num_preemptions for answer in answers)
    assert preempted == engine.stats().num_preemptions
    assert (preempted > 0) == (cache == CACHES["preempting"])


def test_whoever_waits_is_admitted_when_a_place_is_free():
    first, second = Engine(gpt(), max_sequences=1).generate(PROMPTS[:2], GREEDY)
    assert second.timing.added < first.timing.admitted
    assert second.timing.admitted > first.timing.last_token


def test_a_prompt_of_several_steps_is_admitted_with_the_first_of_them():
    engine = Engine(gpt(), token_budget=5)
    engine.add([9] * 17, GREEDY)
    assert engine.step() == []
    between = time.perf_counter()
    while engine.has_work:
        (answer, *_) = engine.step() or [None]
    assert answer.timing.admitted < between < answer.timing.first_token


def test_answers_that_go_on_from_one_prompt_are_admitted_with_their_first_token():
    params = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=4)
    answers = Engine(gpt()).generate([[5, 6, 7]], params)
    assert len({answer.timing.admitted for answer in answers}) == 1
    assert len({answer.timing.added for answer in answers}) == 3


def test_states_that_were_given_do_not_change():
    engine = Engine(gpt())
    engine.add([5, 6, 7], GREEDY)
    (first,), (second,) = engine.step(), engine.step()
    assert first.timing.last_token == first.timing.first_token == second.timing.first_token
    assert second.timing.last_token > first.timing.last_token
