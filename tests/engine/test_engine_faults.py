"""Rows that break, steps that fail, iterators and new weights beside an answer: it is as without them."""

import pytest
import torch
from tests.engine.test_engine import GREEDY, PROMPTS, VOCAB, gpt

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT

DRAWN = {
    "greedy": {"temperature": 0},
    "drawn": {},
    "filtered": {"top_p": 0.9, "top_k": 5, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.2},
    "several": {"n": 2},
}


@pytest.mark.parametrize("how", DRAWN.values(), ids=DRAWN)
def test_a_row_that_is_not_finite_has_no_logprobs_and_harms_no_neighbour(how):
    model = gpt(tie_embeddings=False)
    params = SamplingParams(seed=1, max_tokens=9, logprobs=1, prompt_logprobs=0, **how)
    expected = Engine(model).generate([[5, 6]], params)
    with torch.no_grad():
        model.embedding.weight[50] = torch.nan
    found = Engine(model).generate([[50, 6], [5, 6]], [params] * 2)
    bad, good = found[: len(expected)], found[len(expected) :]
    assert [o.token_ids for o in good] == [o.token_ids for o in expected]
    assert [o.finish_reason for o in good] == ["length"] * params.n
    assert {(o.finish_reason, o.token_ids, o.logprobs) for o in bad} == {("error", (), ())}


@pytest.mark.parametrize("how", [{"temperature": 0}, {}, {"top_p": 0.9}], ids=str)
def test_a_row_whose_changes_leave_no_maximum_ends_alone(how):
    model = gpt(tie_embeddings=False)
    with torch.no_grad():
        model.output.weight.mul_(1e307)  # 100 times as large, they are infinite
    params = SamplingParams(seed=1, max_tokens=4, logprobs=0, **how)
    (expected,) = Engine(model).generate([[5, 6]], params)
    bad, good = Engine(model).generate(
        [list(range(40)), [5, 6]], [params.updated({"repetition_penalty": 0.01}), params]
    )
    assert bad.finish_reason == "error" and "no finite maximum" in bad.error
    assert (bad.token_ids, bad.logprobs) == ((), ())
    assert (good.token_ids, good.logprobs) == (expected.token_ids, expected.logprobs)
    ends = SamplingParams(max_tokens=1, stop_token_ids=range(VOCAB))
    assert Engine(model).generate([[5]], ends)[0].finish_reason == "stop", "min_tokens is 0"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [("_runner", "run"), ("_answers", "settle")], ids="-".join)
def test_answers_go_on_after_a_failed_step_as_if_it_had_not_been(place, error):
    model = gpt(torch.float32, batch_invariant=True)
    params = SamplingParams(n=3, seed=1, max_tokens=5, logprobs=0)
    expected = Engine(model).generate([PROMPTS[0]], params)

    def fail(*args):
        raise error

    for turn in range(3):  # the second step copies the block that the answers share
        engine, found = Engine(model), {}
        engine.add(PROMPTS[0], params)
        for _ in range(turn):
            engine.step()
        owner, method = getattr(engine, place[0]), place[1]
        setattr(owner, method, fail)
        with pytest.raises(error):
            engine.step()
        delattr(owner, method)
        while engine.has_work:
            found |= {o.index: o for o in engine.step()}
        for one in expected:
            assert found[one.index].token_ids == one.token_ids, turn
            assert found[one.index].logprobs == one.logprobs, turn


ITERATORS = {
    "generate": lambda engine: engine.generate([PROMPTS[1]], GREEDY),
    "stream": lambda engine: [*engine.stream(PROMPTS[1], GREEDY)],
    "as_they_end": lambda engine: [*engine.as_they_end([PROMPTS[1]], GREEDY)],
}


@pytest.mark.parametrize("iterate", ITERATORS.values(), ids=ITERATORS)
def test_added_requests_that_end_in_steps_of_iterators_come_with_the_next_step(iterate):
    engine = Engine(gpt())
    params = SamplingParams(n=2, seed=1, max_tokens=5)
    expected = engine.generate([PROMPTS[0]], params)
    for is_aborted in (False, True):
        name = engine.add(PROMPTS[0], params)
        iterate(engine)
        assert engine.has_work and engine.stats().num_running == 0
        with pytest.raises(ConfigError, match="still being answered"):
            engine.add([1], GREEDY, request_id=name)
        found = engine.abort(name) if is_aborted else engine.step()
        assert [o.request_id for o in found] == [name] * 2
        assert [o.token_ids for o in found] == [o.token_ids for o in expected]
        assert not engine.has_work and engine.step() == engine.abort(name) == []


def test_new_weights_leave_what_was_said_of_earlier_tokens():
    engine, other = Engine(gpt()), GPT(gpt().config, dtype=torch.float64, seed=2)
    params = SamplingParams(n=2, seed=1, max_tokens=9, logprobs=0, prompt_logprobs=0, return_routed_experts=True)
    engine.add(PROMPTS[3], params)
    for _ in range(4):
        before = engine.step()
    engine.update_weights(other.state_dict())
    while engine.has_work:
        after = engine.step()
    for old, new in zip(before, after, strict=True):
        assert len(new.routed_experts) == len(PROMPTS[3]) + 9 - 1
        assert torch.equal(new.routed_experts[: len(old.routed_experts)], old.routed_experts)
        assert new.logprobs[:4] == old.logprobs and new.prompt_logprobs == old.prompt_logprobs
