"""Texts continued by the engine and in step: the same tokens, batches equal single prompts, modes and errors."""

from typing import Any

import pytest
import torch
from tests.data.test_text_stream import TEXT, tokenizer  # noqa: F401
from tests.support.generation import written_ids
from tests.support.operators import Operators
from tokenizers import Tokenizer

import expertmesh as em
from expertmesh.config.moe import MoEConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.lockstep import Lockstep
from expertmesh.engine.request import SamplingParams, for_prompts
from expertmesh.engine.texts import continue_prompts, continued, prompt_ids, stream_text, writer
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.text.format import text_format

MOE = {"num_experts": (4,), "top_k": 2, "hidden_dim": 32}
PAGED, IN_STEP = {}, {"max_capacity_factor": 1e6}
"""Options of layers: the engine serves the first, and the bound of the second, which drops nothing, is for the lockstep
loop."""
WAYS = {"engine": PAGED, "lockstep": IN_STEP}
PROMPTS = [[5, 17, 200, 31], [7], [90, 91, 92, 93, 94, 95, 96]]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return make_model(**request.param)


def make_model(**moe: Any) -> GPT:
    config = ModelConfig(
        vocab_size=300,
        max_seq_len=48,
        dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        init_std=0.4,
        tie_embeddings=False,
        moe=MoEConfig(**MOE | moe),
    )
    return GPT(config, dtype=torch.float64, seed=0).eval()


def uncached_greedy(gpt: GPT, prompt: list[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    gpt.eval()
    for _ in range(new_tokens):
        ids.append(int(gpt(torch.tensor([ids])).logits_BSV[0, -1].argmax()))
    return ids[len(prompt) :]


def test_who_answers_is_whom_the_model_lets() -> None:
    assert isinstance(writer(make_model()), Engine)
    for options in (IN_STEP, {"router": "expert_choice", "aux_loss_weight": 0.0}):
        assert isinstance(writer(make_model(**options)), Lockstep)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_cached_equals_uncached(gpt: GPT, prompt: list[int]) -> None:
    expected = uncached_greedy(gpt, prompt, 30)
    assert len(set(expected)) > 5, "the test model repeats itself too much to show anything"
    assert written_ids(gpt, [prompt], max_tokens=30) == [expected]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
def test_a_batch_gives_each_prompt_what_it_gets_alone(gpt: GPT, options: dict[str, Any]) -> None:
    together = written_ids(gpt, PROMPTS, max_tokens=12, **options)
    seed = options.pop("seed", 0)
    each = for_prompts([SamplingParams(seed=seed)] * len(PROMPTS))
    for prompt, own, written in zip(PROMPTS, each, together, strict=True):
        assert written_ids(gpt, [prompt], max_tokens=12, seed=own.seed, **options) == [written]


def test_both_draw_the_same_numbers() -> None:
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 - 1}
    paged, in_step = (written_ids(make_model(**way), PROMPTS, max_tokens=9, **options) for way in WAYS.values())
    assert paged == in_step


def test_many_texts_are_continued_a_few_at_a_time(gpt: GPT) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=9)
    sizes: list[int] = []
    hook = gpt.output.register_forward_hook(lambda module, x, y: sizes.append(y[..., 0].numel()))
    together, apart = (
        [o.token_ids for o in continue_prompts(gpt, PROMPTS, params, batch_size=size)] for size in (3, 2)
    )
    hook.remove()
    assert apart == together and max(sizes) == 3
    with pytest.raises(ConfigError, match="batch_size=0: must be a whole number of at least 1"):
        continue_prompts(gpt, PROMPTS, params, batch_size=0)


def test_a_capacity_in_evaluation_drops_nothing_of_what_is_generated() -> None:
    capped = make_model(eval_capacity_factor=0.5, min_capacity=1)
    plain = written_ids(make_model(), PROMPTS, max_tokens=6)
    assert written_ids(capped, PROMPTS, max_tokens=6) == plain


def test_ends_and_stops_end_each_answer_by_itself(gpt: GPT, tokenizer: Tokenizer) -> None:  # noqa: F811
    endless = written_ids(gpt, PROMPTS, max_tokens=20)
    end = endless[0][4]
    for ids, found in zip(endless, written_ids(gpt, PROMPTS, max_tokens=20, ends=[end]), strict=True):
        assert found == (ids[: ids.index(end)] if end in ids else ids)
    text = text_format(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = continue_prompts(gpt, PROMPTS, params, text=text)[0].text
    assert len(whole) > 3
    stopped = SamplingParams(temperature=0, max_tokens=20, stop=whole[2:4])
    (answer, *_) = continue_prompts(gpt, PROMPTS, stopped, text=text)
    assert answer.text == whole[: whole.index(whole[2:4])] and answer.finish_reason == "stop"


def test_same_seed_same_text_other_seed_other_text(gpt: GPT) -> None:
    texts = [written_ids(gpt, [[5]], max_tokens=20, temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_default_fills_the_model_and_no_more(gpt: GPT) -> None:
    assert [len(one) for one in written_ids(gpt, [[1, 2, 3]])] == [45]
    assert [len(one) for one in written_ids(gpt, [[1] * 47])] == [1]


def test_tokens_stream_one_by_one(gpt: GPT, tokenizer: Tokenizer) -> None:  # noqa: F811
    calls: list[int] = []
    handle = gpt.register_forward_pre_hook(lambda *_: calls.append(1))
    text, params = text_format(tokenizer), SamplingParams(temperature=0, max_tokens=9)
    stream = stream_text(gpt, [5, 6], params, text=text)
    assert not calls, "nothing is computed before the first piece is asked for"
    pieces = [next(stream)]
    assert 1 <= len(calls) < 9
    pieces += stream
    handle.remove()
    assert all(pieces) and len(calls) == 9
    assert "".join(pieces) == continue_prompts(gpt, [[5, 6]], params, text=text)[0].text


def test_texts_that_are_not_read_leave_nothing(tokenizer: Tokenizer) -> None:  # noqa: F811
    engine = Engine(make_model(), tokenizer=tokenizer)
    text, params = text_format(tokenizer), SamplingParams(temperature=0, max_tokens=9)
    for begin in (
        lambda: continued(engine.model, PROMPTS, params, by=engine),
        lambda: stream_text(engine.model, [5], params, text=text, by=engine),
    ):
        for num_read in (0, 1):
            texts = begin()
            assert engine.has_work
            assert len([next(texts) for _ in range(num_read)]) == num_read
            texts.close()
            assert not engine.has_work and list(texts) == []
            texts = begin()
            del texts
            assert not engine.has_work


def test_texts_by_turns_on_one_engine_are_whole() -> None:
    engine = Engine(make_model())
    params = SamplingParams(temperature=0, max_tokens=9)
    turns = [continued(engine.model, PROMPTS, params, by=engine) for _ in range(2)]
    for prompt, *answers in zip(PROMPTS, *turns, strict=True):
        expected = uncached_greedy(engine.model, prompt, 9)
        assert [list(one.token_ids) for one in answers] == [expected] * 2


def test_parameters_are_one_for_each_prompt_in_lockstep() -> None:
    lockstep, one = Lockstep(make_model(**IN_STEP)), SamplingParams(max_tokens=1)
    for wrong in ([], [one, one], [one] * 4):
        with pytest.raises(ConfigError, match=f"params: {len(wrong)} for 3 prompts; give one"):
            lockstep.as_they_end(PROMPTS, wrong)
    with pytest.raises(ConfigError, match=r"params is a dict; it must be a SamplingParams; give"):
        lockstep.as_they_end(PROMPTS, {"max_tokens": 1})


def test_training_mode_is_put_back() -> None:
    for way in WAYS.values():
        noisy = make_model(router_noise="gumbel", **way)
        expected = uncached_greedy(noisy, [5], 10)
        for training in (True, False):
            noisy.train(training)
            assert written_ids(noisy, [[5]], max_tokens=10) == [expected]
            assert all(module.training == training for module in noisy.modules())


def test_no_gradients_are_kept(gpt: GPT) -> None:
    outputs: list[bool] = []
    handle = gpt.register_forward_hook(lambda *a: outputs.append(a[-1].logits_BSV.requires_grad))
    written_ids(gpt, [[5]], max_tokens=3)
    handle.remove()
    assert outputs == [False] * 3


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "nothing to continue"),
        ([[]], {}, "prompt='': is empty"),
        ([[1], []], {}, "prompt='': is empty"),
        ([[300]], {}, "token id 300: must be a whole number from 0 to 299"),
        ([[-1]], {}, "token id -1"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ([[1] * 48], {}, "prompt of 48 tokens: must be shorter than the model's max_seq_len=48"),
        ([[1] * 40], {"max_tokens": 9}, "max_tokens=9: .* ask for at most 8"),
    ],
)
def test_bad_requests_are_refused_at_once(
    gpt: GPT, prompts: list[list[int]], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        continue_prompts(gpt, prompts, SamplingParams(**options))


@pytest.mark.parametrize("options", [{"n": 2}, {"logit_bias": {3: 1.0}}, {"logprobs": 1}, {"min_tokens": 2}], ids=str)
def test_what_only_the_engine_serves_is_refused_by_name(options: dict[str, Any]) -> None:
    (name, _) = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name}=.*is not served for a GPT"):
        continue_prompts(make_model(**IN_STEP), PROMPTS, SamplingParams(**options))


def test_generated_text_is_that_of_the_generated_ids(gpt: GPT, tokenizer: Tokenizer) -> None:  # noqa: F811
    text = text_format(tokenizer)
    ids = prompt_ids(text, TEXT[:9])
    assert ids == [0, *tokenizer.encode(TEXT[:9]).ids]
    assert prompt_ids(text, TEXT[:9], start=False) == ids[1:]
    new = written_ids(gpt, [ids], max_tokens=20, temperature=0.8, seed=4, ends=text.end_ids)
    found = em.generate(gpt, tokenizer, TEXT[:9], max_tokens=20, temperature=0.8, seed=4)
    assert found == tokenizer.decode(new[0])


def test_the_host_asks_for_nothing_but_the_tokens() -> None:
    steps = Lockstep(make_model(**IN_STEP)).stream([5, 17], SamplingParams(seed=1, max_tokens=3))
    next(steps)
    with Operators() as seen:
        next(steps)
    assert torch.ops.aten._local_scalar_dense.default not in seen.ran, "a GPU would make it wait"


def test_weights_that_are_not_finite_are_an_error(gpt: GPT) -> None:
    with torch.no_grad():
        gpt.final_norm.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        written_ids(gpt, [[5]])


def test_only_the_engine_guesses():
    config = em.recipe("gpt-moe-test").model
    guessing = writer(em.GPT(config, seed=0).eval(), num_draft_tokens=3)
    assert isinstance(guessing, em.Engine) and guessing.config.num_draft_tokens == 3
    unpaged = config.updated({"moe.router": "expert_choice", "moe.top_k": 1})
    with pytest.raises(em.ConfigError, match="num_draft_tokens=3: router=expert_choice"):
        writer(em.GPT(unpaged, seed=0).eval(), num_draft_tokens=3)
