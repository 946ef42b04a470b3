"""The engine against full forward passes of the same model: tokens, logprobs, ends, and what neighbours may not
change."""

import math
import sys
import threading
from collections import Counter

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.text.stream import TextStream
from expertmesh.text.tokenizer import train_tokenizer

VOCAB = 64
PROMPTS = [[5, 6, 7], [9] * 17, [1, 2], list(range(20, 45)), [9] * 17 + [3], [5, 6, 7, 8, 1]]
GREEDY = SamplingParams(temperature=0, max_tokens=9)


def gpt(dtype=torch.float64, *, moe=None, **options):
    defaults = {
        "vocab_size": VOCAB,
        "max_seq_len": 64,
        "dim": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "qk_norm": True,
        "init_std": 0.3,
        "moe": {"num_experts": (4,), "hidden_dim": 20} | (moe or {}),
    }
    return GPT(ModelConfig(**defaults | options), dtype=dtype, seed=1).eval()


@torch.no_grad()
def alone(model, prompt, new):
    """Greedy tokens and the logprobs of every step, by full forward passes."""
    ids, scores = list(prompt), []
    for _ in range(new):
        logits = model(torch.tensor([ids])).logits_BSV[0, -1]
        scores.append(logits.log_softmax(-1))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], scores


CACHES = {
    "roomy": {},
    "small blocks": {"block_size": 2},
    "chunks": {"token_budget": 5, "block_size": 4},
    "preempting": {"num_blocks": 14, "block_size": 4, "max_sequences": 5},
    "one at a time": {"max_sequences": 1, "prefix_caching": False},
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_greedy_tokens_and_logprobs_are_those_of_full_passes(cache):
    model = gpt()
    engine = Engine(model, **cache)
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=3)
    outputs = engine.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, scores = alone(model, prompt, 9)
        assert list(output.token_ids) == tokens and output.finish_reason == "length"
        for one, row in zip(output.logprobs, scores, strict=True):
            expected = row[list(dict(one.top))]
            assert_close_fp64(torch.tensor([p for _, p in one.top], dtype=torch.float64), expected, what="top")
            assert dict(one.top)[one.token_id] == one.logprob
    stats = engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    assert (stats.num_preemptions > 0) == ("num_blocks" in cache)


def test_prompts_are_scored_and_experts_returned():
    model = gpt()
    engine = Engine(model, token_budget=7)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, return_routed_experts=True, n=2)
    for output in engine.generate([PROMPTS[3], PROMPTS[3]], params):
        ids = torch.tensor([[*output.prompt_ids, *output.token_ids]])
        with torch.no_grad():
            full = model(ids)
        scores = full.logits_BSV[0].log_softmax(-1)
        expected = scores[:-1].gather(1, ids[0, 1:, None])[: len(PROMPTS[3]) - 1, 0]
        first, *others = output.prompt_logprobs
        assert first is None
        found = torch.tensor([one.logprob for one in others], dtype=torch.float64)
        assert_close_fp64(found, expected, what="prompt logprobs")
        experts = torch.stack([one.topk_expert_ids_TK for one in full.stats], 1)
        assert torch.equal(output.routed_experts, experts[:-1])


ROUTERS = {
    "softmax": {},
    "sigmoid": {"score_function": "sigmoid"},
    "cosine": {"router": "cosine"},
    "hash": {"router": "hash", "top_k": 1},
    "shared": {"num_shared_experts": 1},
    "residual": {"residual": True, "top_k": 1},
    "pyramid": {"num_experts": (2, 4)},
}
ARRANGEMENTS = {
    "chunks": {"token_budget": 3, "block_size": 4},
    "preempted": {"num_blocks": 12, "block_size": 4, "max_sequences": 6},
    "cold": {"prefix_caching": False, "block_size": 2},
}


def routers_by_turns():
    """Each router in one of the two types, the first in both."""
    for number, (name, router) in enumerate(ROUTERS.items()):
        for place, dtype in enumerate((torch.float32, torch.bfloat16)):
            marks = () if number == 0 or number % 2 == place else pytest.mark.exhaustive
            yield pytest.param(router, dtype, marks=marks, id=f"{name}-{('fp32', 'bf16')[place]}")


@pytest.mark.parametrize(("router", "dtype"), [*routers_by_turns()])
def test_deterministic_bits_do_not_depend_on_neighbours(router, dtype):
    """Alone, together, reversed, cut, preempted, from the cache: the same tokens and the same bits of logprobs."""
    model = gpt(dtype, moe=router, batch_invariant=True)
    kinds = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=2),
        SamplingParams(temperature=1.3, top_p=0.9, seed=4, max_tokens=6, logprobs=2, n=2),
    ]
    prompts = [PROMPTS[i] for i in (0, 1, 3, 4)]
    asked = [(p, kind) for p in prompts for kind in kinds]

    def answers(engine, some):
        found = engine.generate([p for p, _ in some], [kind for _, kind in some])
        return Counter((o.prompt_ids, o.index, o.token_ids, o.logprobs) for o in found)

    expected = Counter()
    for one in asked:
        expected += answers(Engine(model, deterministic=True), [one])
    for how in ARRANGEMENTS.values():
        engine = Engine(model, deterministic=True, **how)
        assert answers(engine, asked) == expected
        assert answers(engine, asked[::-1]) == expected, "with what the first round left"


def test_draws_follow_the_distribution_whatever_the_batch():
    model = gpt()
    params = [
        SamplingParams(temperature=0.7, top_k=8, top_p=0.8, min_p=0.02, seed=s, max_tokens=1) for s in range(3000)
    ]
    found = Counter(o.token_ids[0] for o in Engine(model, max_sequences=300).generate([[5, 6]] * 3000, params))
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6]])).logits_BSV[0, -1] / 0.7
    kept = logits.topk(8)
    probs = kept.values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = torch.where((before < 0.8) & (probs >= 0.02 * probs[0]), probs, 0)
    probs = probs / probs.sum()
    expected = {int(i): 3000 * float(p) for i, p in zip(kept.indices, probs, strict=True) if p > 0}
    assert set(found) <= set(expected) and len(expected) > 2
    chi = sum((found[i] - e) ** 2 / e for i, e in expected.items())
    freedom = len(expected) - 1
    assert chi < freedom + 8 * math.sqrt(2 * freedom), "seeds are fixed: this is no lottery"


def test_penalties_biases_and_least_lengths():
    model = gpt()
    engine = Engine(model, end_ids=[alone(model, [5, 6, 7], 1)[0][0]])
    (ended,) = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
    assert ended.finish_reason == "stop" and len(ended.token_ids) == 1
    (longer,) = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5, min_tokens=3))
    assert len(longer.token_ids) >= 3 and longer.token_ids[0] != ended.token_ids[0]
    (biased,) = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, logit_bias={11: 100}))
    assert biased.token_ids == (11, 11, 11)
    for penalty in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.7},
    ):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **penalty)
        (output,) = engine.generate([5, 6, 7], params)
        ids, kind = [5, 6, 7], next(iter(penalty))
        for token in output.token_ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits_BSV[0, -1].clone()
            for other in set(ids if kind == "repetition_penalty" else ids[3:]):
                if kind == "repetition_penalty":
                    logits[other] *= 1 / 1.7 if logits[other] > 0 else 1.7
                else:
                    logits[other] -= 2.0 * (ids[3:].count(other) if kind == "frequency_penalty" else 1)
            assert token == int(logits.argmax()), kind
            ids.append(token)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["ab äöü 文字 stop now " * 30], vocab_size=300)


@pytest.fixture(scope="module")
def writer(tokenizer):
    return gpt(torch.float32, vocab_size=tokenizer.get_vocab_size())


def test_stops_neither_eat_nor_leave_text(writer, tokenizer):
    engine = Engine(writer, tokenizer)
    drawn = SamplingParams(temperature=1.5, seed=3, max_tokens=40)
    (whole,) = engine.generate(["ab"], drawn)
    text = whole.text
    assert text == "".join(map((stream := TextStream(tokenizer)).feed, whole.token_ids)) + stream.finish()
    for size in (1, 2, 5):
        for at in range(3, len(text) - size, 4):
            stop = text[at : at + size]
            params = SamplingParams(temperature=1.5, seed=3, max_tokens=40, stop=["\u0000never", stop])
            (cut,) = engine.generate(["ab"], params)
            assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
            given = [one.text for one in engine.stream("ab", params)]
            assert given[-1] == cut.text
            assert all(later.startswith(early) for early, later in zip(given, given[1:], strict=False))


def test_streams_that_are_left_hold_nothing(writer, tokenizer):
    engine = Engine(writer, tokenizer)
    for _ in engine.stream("ab", SamplingParams(max_tokens=20, n=2)):
        break
    assert not engine.has_work or engine.stats().num_used_blocks >= 0
    stream = engine.stream("ab", SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    assert engine.stats().num_used_blocks == 0 and not engine.has_work


def test_an_abort_in_any_state_leaves_the_others_alone():
    model = gpt()
    engine = Engine(model, num_blocks=16, block_size=4, token_budget=6)
    names = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    found = {}
    for turn, gone in enumerate((names[1], names[3], names[5])):
        engine.step()
        (output,) = engine.abort(gone)
        assert output.finish_reason == "abort", turn
        assert engine.abort(gone) == []
    while engine.has_work:
        found |= {o.request_id: o for o in engine.step() if o.finish_reason}
    assert set(found) == {names[0], names[2], names[4]}
    for name, output in found.items():
        assert list(output.token_ids) == alone(model, PROMPTS[names.index(name)], 9)[0]


def test_new_weights_forget_prefixes_and_wrong_ones_change_nothing():
    model, other = gpt(), gpt(init_std=0.6)
    engine = Engine(model, block_size=2)
    engine.generate(PROMPTS, GREEDY)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(name for name, tensor in before.items() if tensor.ndim == 2)
    for wrong in ({"no.such": torch.zeros(1)}, {name: before[name][:1]}):
        state = other.state_dict() | wrong
        with pytest.raises(ConfigError, match=r"no\.such|has shape"):
            engine.update_weights(state)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    running = engine.add(PROMPTS[3], GREEDY)
    engine.step()
    engine.update_weights(other.state_dict())
    assert engine.stats().num_cached_blocks == 0
    engine.abort(running)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [alone(other, p, 9)[0] for p in PROMPTS]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_breaks_off_leaves_nothing_of_the_former_weights_to_reuse(error):
    engine = Engine(gpt(), block_size=2)
    engine.generate(PROMPTS, GREEDY)
    assert engine.stats().num_cached_blocks

    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                raise error
            return super().__torch_function__(function, types, args, kwargs or {})

    name, tensor = next(iter(engine.model.state_dict().items()))
    with pytest.raises(error):
        engine.update_weights({name: tensor.clone().as_subclass(Broken)})
    assert engine.stats().num_cached_blocks == 0


def test_floating_weights_of_another_width_are_rounded():
    model, other = gpt(torch.float32), gpt(init_std=0.6)
    Engine(model).update_weights(other.state_dict())
    assert torch.equal(model.embedding.weight, other.embedding.weight.float())


@pytest.mark.parametrize("how", ["generate", "stream", "as_they_end"])
def test_threads_take_turns(how):
    """Each thread gets the answers of its own prompts, whoever makes the steps."""
    model = gpt()
    engine, found = Engine(model), [[] for _ in range(4)]
    want = [alone(model, prompt, 9)[0] for prompt in PROMPTS]

    def ask(place):
        for turn in range(3):
            mine = [(place + turn + i) % len(PROMPTS) for i in range(2)]
            prompts = [PROMPTS[i] for i in mine]
            if how == "generate":
                outputs = engine.generate(prompts, GREEDY)
            elif how == "stream":
                outputs = [list(engine.stream(prompt, GREEDY))[-1] for prompt in prompts]
            else:
                ended = dict(engine.as_they_end(prompts, GREEDY))
                outputs = [ended[i][0] for i in range(len(prompts))]
            found[place] += [(i, list(o.token_ids)) for i, o in zip(mine, outputs, strict=True)]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(found))]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert [[tokens == want[i] for i, tokens in one] for one in found] == [[True] * 6] * 4
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_number_as_a_request_id_blocks_no_other_request():
    engine = Engine(gpt())
    taken = [engine.add([1], GREEDY, request_id=str(number)) for number in range(1, 4)]
    (output,) = engine.generate([PROMPTS[0]], GREEDY)
    assert output.request_id not in taken
    names = [engine.add([1], GREEDY) for _ in range(3)]
    assert len({*names, *taken}) == 6


def test_logits_that_are_not_finite_end_their_request_alone():
    model = gpt()
    with torch.no_grad():
        model.embedding.weight[50] = torch.nan  # tied: the logit of token 50 is broken in every row
    (output,) = Engine(model).generate([5, 6], GREEDY)
    assert output.finish_reason == "error" and "not finite" in output.error
    model = gpt(tie_embeddings=False)
    with torch.no_grad():
        model.embedding.weight[50] = torch.nan
    engine = Engine(model)
    good, bad = engine.generate([[5, 6], [50, 6]], GREEDY)
    assert bad.finish_reason == "error" and bad.token_ids == ()
    assert list(good.token_ids) == alone(model, [5, 6], 9)[0]
    assert engine.stats().num_used_blocks == 0


BAD_PROMPTS = {
    "empty": ([], {}, "is empty"),
    "above the vocabulary": ([VOCAB], {}, "must be a whole number from 0 to 63"),
    "negative": ([-1], {}, "must be a whole number from 0 to 63"),
    "no integer": ([1.5, 2], {}, "must be a whole number from 0 to 63"),
    "text without a tokenizer": ("abc", {}, "has no tokenizer"),
    "too long": ([1] * 64, {}, "shorter than 33 tokens, as the cache holds 32"),
    "too many new": ([1] * 29, {"max_tokens": 5}, "ask for at most 4"),
    "longer than the cache": ([1] * 40, {"max_tokens": 20}, "the cache holds 32 tokens"),
    "stop without a tokenizer": ([1], {"stop": "a"}, "use stop_token_ids"),
    "stop id": ([1], {"stop_token_ids": (64,)}, "stop_token_ids"),
    "bias": ([1], {"logit_bias": {99: 1.0}}, "logit_bias"),
}


@pytest.mark.parametrize(("prompt", "params", "line"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_request_is_refused_alone(prompt, params, line):
    model = gpt()
    engine = Engine(model, num_blocks=8, block_size=4)
    good = engine.add([5, 6], GREEDY)
    with pytest.raises(ConfigError, match=line) as caught:
        engine.add(prompt, SamplingParams(**params))
    assert "\n" not in str(caught.value)
    while engine.has_work:
        found = {o.request_id: o for o in engine.step()}
    assert list(found[good].token_ids) == alone(model, [5, 6], 9)[0]


def test_bad_engines_are_refused():
    with pytest.raises(ConfigError, match=r"call model\.eval"):
        Engine(gpt().train())
    engine = Engine(model := gpt())
    engine.add([1], GREEDY)
    model.train()
    with pytest.raises(ConfigError, match=r"call model\.eval"):
        engine.step()
    model.eval().bfloat16()
    with pytest.raises(ConfigError, match=r"are torch.bfloat16 now, and were torch.float64 .*; make another engine"):
        engine.step()
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        Engine(gpt(), deterministic=True)
    with pytest.raises(ConfigError, match="expert_choice"):
        Engine(gpt(moe={"router": "expert_choice", "routing_group_size": None}))
    with pytest.raises(ConfigError, match="the engine serves a GPT"):
        Engine(torch.nn.Linear(2, 2).eval())
    for wrong in (
        {"block_size": 0},
        {"num_blocks": -1},
        {"token_budget": 0},
        {"max_sequences": 0},
        {"blocks": 3},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Engine(gpt(), **wrong)
    with pytest.raises(ConfigError, match="give SamplingParams"):
        Engine(gpt()).add([1], {"temperature": 0})
    with pytest.raises(ConfigError, match="2 for 1 prompts"):
        Engine(gpt()).generate([[1]], [GREEDY, GREEDY])
    engine = Engine(gpt())
    with pytest.raises(ConfigError, match="is empty"):
        engine.generate([[1], []], GREEDY)
    assert not engine.has_work, "a refused batch leaves nothing"


def test_the_load_of_experts_counts_every_token_of_every_layer_with_experts():
    model = GPT(RECIPES["gpt-moe-test"]().model, seed=0).eval()
    engine = Engine(model, num_blocks=8)
    engine.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=4))
    computed = 3 + 2 + 2 * 3  # the last token of an answer is drawn, not read
    moe = model.config.moe
    assert [len(one) for one in engine.expert_load()] == list(model.config.experts_per_layer())
    assert [sum(one) for one in engine.expert_load()] == [computed * moe.top_k] * 2


def test_answers_come_as_they_end_and_those_behind_are_aborted():
    engine = Engine(gpt())
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (9, 2, 30)]
    ended = engine.as_they_end(PROMPTS[:3], params)
    (place, (short,)), (first, (long,)) = next(ended), next(ended)
    assert (place, first) == (1, 0) and engine.has_work
    alone = engine.generate(PROMPTS[:2], params[:2])
    assert [one.token_ids for one in (long, short)] == [one.token_ids for one in alone]
    ended.close()
    assert not engine.has_work


WAYS_TO_STEP = {
    "generate": lambda engine, ended: engine.generate([[3, 3]], SamplingParams(max_tokens=20)),
    "steps of one's own": lambda engine, ended: [engine.step() for _ in range(20)],
    "nobody else": lambda engine, ended: None,
}


@pytest.mark.parametrize("meanwhile", WAYS_TO_STEP.values(), ids=WAYS_TO_STEP)
def test_iterators_lose_nothing_of_the_steps_of_others(meanwhile):
    model = gpt()
    expected = [alone(model, prompt, 9)[0] for prompt in PROMPTS[:3]]
    engine = Engine(model)
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (9, 2, 9)]
    first = engine.as_they_end(PROMPTS[:3], params)
    second = engine.as_they_end(PROMPTS[:3], params)
    found = [{}, {}]
    for _ in PROMPTS[:3]:  # by turns
        for own, ended in zip(found, (first, second), strict=True):
            place, (output,) = next(ended)
            assert output.finish_reason == "length"
            own[place] = list(output.token_ids)
            meanwhile(engine, ended)
    answers = dict(enumerate([expected[0], expected[1][:2], expected[2]]))
    assert found == [answers, answers] and [*first] == [*second] == []
    lengths = []
    for output in engine.stream(PROMPTS[0], GREEDY):
        assert list(output.token_ids) == expected[0][: len(output.token_ids)]
        lengths.append(len(output.token_ids))
        meanwhile(engine, None)
    assert lengths == sorted(set(lengths)) and output.finish_reason == "length"
    assert lengths[-1] == 9 and not engine.has_work


def test_iterators_end_what_they_await_before_the_first_answer_too():
    engine = Engine(gpt())
    for begin in (
        lambda: engine.as_they_end(PROMPTS[:2], GREEDY),
        lambda: engine.stream(PROMPTS[0], GREEDY),
    ):
        answers = begin()
        assert engine.has_work
        answers.close()
        assert not engine.has_work and [*answers] == []
        answers = begin()
        del answers
        assert not engine.has_work and engine.stats().num_used_blocks == 0

    def fail(count):
        raise ValueError(count)

    with pytest.raises(ValueError, match="1") as caught:
        engine.generate(PROMPTS[:3], [SamplingParams(max_tokens=n) for n in (1, 9, 9)], told=fail)
    assert caught and not engine.has_work


def test_an_abort_by_another_ends_the_wait_with_what_there_was():
    engine = Engine(gpt())
    ended = engine.as_they_end([PROMPTS[0], PROMPTS[1]], GREEDY)
    engine.add([1], SamplingParams(max_tokens=1), request_id="own")
    engine.step()
    (aborted,) = engine.abort("0")
    with pytest.raises(ConfigError, match="request_id='0': is still being answered"):
        engine.add([1], GREEDY, request_id="0")
    assert next(ended) == (0, [aborted]) and aborted.finish_reason == "abort"
    engine.add([1], SamplingParams(temperature=0, max_tokens=30), request_id="0")
    assert next(ended)[1][0].finish_reason == "length"
    ended.close()
    assert engine.has_work, "the id is another's now"


@pytest.mark.parametrize("options", [{}, {"sinks": True, "sliding_window": 3}], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_autocast_caches_its_type_for_models_of_every_type(dtype, options):
    """Chunks and cached prefixes meet keys in another type than the queries'."""
    model, prompts = gpt(dtype, **options), [(list(prompt) * 3)[:40] for prompt in PROMPTS[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model, token_budget=5, block_size=4)
        assert engine._runner.cache.k.dtype == torch.bfloat16
        first = engine.generate(prompts, GREEDY)
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == [o.token_ids for o in first]
