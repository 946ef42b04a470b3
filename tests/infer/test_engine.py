"""Generation: cached equals uncached, batches equal single prompts, text comes in whole characters."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.operators import Operators
from tests.support.sentencepiece_vocabulary import sentencepiece_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from expertmesh.config.moe import MoEConfig
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.infer.engine import generate, generate_batch, generate_text, generate_texts
from expertmesh.infer.sampling import Sampling
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.text.stream import TextStream, byte_of_character

TEXT = "def naïve(x):\n    return '日本語 🙂' + x  # Ελληνικά\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator([TEXT] * 20, trainer)
    return tok


@pytest.fixture(scope="module")
def gpt() -> GPT:
    return make_model()


def make_model(**options: Any) -> GPT:
    defaults: dict[str, Any] = {
        "vocab_size": 300,
        "max_seq_len": 48,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "init_std": 0.4,
        "tie_embeddings": False,
        "moe": MoEConfig(num_experts=(4,), top_k=2, hidden_dim=32),
    }
    return GPT(ModelConfig(**(defaults | options)), dtype=torch.float64, seed=0)


PROMPTS = [[5, 17, 200, 31], [7], [90, 91, 92, 93, 94, 95, 96]]


def uncached_greedy(gpt: GPT, prompt: list[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    gpt.eval()
    for _ in range(new_tokens):
        ids.append(int(gpt(torch.tensor([ids])).logits_BSV[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_cached_equals_uncached(gpt: GPT, prompt: list[int]) -> None:
    expected = uncached_greedy(gpt, prompt, 30)
    assert len(set(expected)) > 5, "the test model repeats itself too much to show anything"
    assert list(generate(gpt, prompt, max_tokens=30)) == expected


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(temperature=0.9, seed=3)])
def test_a_batch_gives_each_prompt_what_it_gets_alone(gpt: GPT, sampling: Sampling) -> None:
    steps = list(generate_batch(gpt, PROMPTS, max_tokens=12, sampling=sampling))
    assert len(steps) == 12
    for row, prompt in enumerate(PROMPTS):
        own = Sampling(
            greedy=sampling.greedy, temperature=sampling.temperature, seed=sampling.seed + row
        )
        alone = list(generate(gpt, prompt, max_tokens=12, sampling=own))
        assert [step[row] for step in steps] == alone


def test_many_texts_are_continued_a_few_at_a_time(gpt: GPT, tokenizer: Tokenizer) -> None:
    """With the same numbers drawn, and as many tokens as all of them leave room for."""
    sizes: list[int] = []
    hook = gpt.embedding.register_forward_hook(lambda module, ids, y: sizes.append(len(y)))
    prompts = ["def", "x", "return '' + x"]
    sampling = Sampling(temperature=0.9, seed=2**63 - 1)
    together, apart = (
        generate_texts(gpt, tokenizer, prompts, sampling=sampling, batch_size=size)
        for size in (3, 2)
    )
    hook.remove()
    assert apart == together and len(set(together)) == 3
    assert set(sizes[: len(sizes) // 3]) == {3} and set(sizes[len(sizes) // 3 :]) == {1, 2}
    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        generate_texts(gpt, tokenizer, prompts, batch_size=0)


def test_a_capacity_in_evaluation_drops_nothing_of_what_is_generated(gpt: GPT) -> None:
    options = {"num_experts": (4,), "top_k": 2, "hidden_dim": 32}
    capped = make_model(moe=MoEConfig(**options, eval_capacity_factor=0.5, min_capacity=1))
    steps, capped_steps = (
        list(generate_batch(model, PROMPTS, max_tokens=6)) for model in (gpt, capped)
    )
    assert capped_steps == steps


def test_end_of_text_ends_each_sequence_by_itself(gpt: GPT) -> None:
    endless = [list(generate(gpt, prompt, max_tokens=20)) for prompt in PROMPTS]
    eos = endless[0][4]
    steps = list(generate_batch(gpt, PROMPTS, max_tokens=20, eos_id=eos))
    for row, ids in enumerate(endless):
        expected = ids[: ids.index(eos)] if eos in ids else ids
        got = [step[row] for step in steps]
        assert got[: len(expected)] == expected
        assert got[len(expected) :] == [None] * (len(steps) - len(expected))
    assert list(generate(gpt, PROMPTS[0], max_tokens=20, eos_id=eos)) == endless[0][:4]


def test_same_seed_same_text_other_seed_other_text(gpt: GPT) -> None:
    texts = [
        list(generate(gpt, [5], max_tokens=20, sampling=Sampling(seed=seed))) for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_default_fills_the_model_and_no_more(gpt: GPT) -> None:
    assert len(list(generate(gpt, [1, 2, 3]))) == 45
    assert len(list(generate(gpt, [1] * 47))) == 1


def test_tokens_stream_one_by_one(gpt: GPT) -> None:
    calls: list[int] = []
    handle = gpt.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        stream: Iterator[int] = generate(gpt, [5, 6])
        assert not calls, "nothing is computed before the first token is asked for"
        for expected in (1, 2, 3):
            next(stream)
            assert len(calls) == expected
    finally:
        handle.remove()


def test_training_mode_is_put_back(gpt: GPT) -> None:
    noisy = make_model(
        moe=MoEConfig(num_experts=(4,), top_k=2, hidden_dim=32, router_noise="gumbel")
    )
    expected = uncached_greedy(noisy, [5], 10)
    for training in (True, False):
        noisy.train(training)
        assert list(generate(noisy, [5], max_tokens=10)) == expected
        assert noisy.training == training


def test_no_gradients_are_kept(gpt: GPT) -> None:
    outputs: list[bool] = []
    handle = gpt.register_forward_hook(lambda *a: outputs.append(a[-1].logits_BSV.requires_grad))
    try:
        list(generate(gpt, [5], max_tokens=3))
    finally:
        handle.remove()
    assert outputs == [False] * 3


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "nothing to continue"),
        ([[]], {}, "prompt='': is empty"),
        ([[1], []], {}, "prompt='': is empty"),
        ([[300]], {}, "token id 300: must be from 0 to 299"),
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
        generate_batch(gpt, prompts, **options)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token_id) for token_id in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.feed(tokenizer.token_to_id("<|endoftext|>")) == ""
    assert stream.feed(10_000) == ""


def test_blanks_that_were_added_to_a_byte_level_vocabulary_are_text(tokenizer: Tokenizer) -> None:
    """As in OLMoE's, for indentation."""
    larger = Tokenizer.from_str(tokenizer.to_str())
    larger.add_tokens(["    ", "日本"])
    ids = larger.encode("def f:    return '日本'").ids
    assert not {larger.token_to_id("    "), larger.token_to_id("日本")} - set(ids)
    stream = TextStream(larger)
    assert "".join(map(stream.feed, ids)) + stream.finish() == larger.decode(ids)


def test_a_vocabulary_of_sentencepiece_is_read() -> None:
    """The blank of a continuation stays, which decoding it alone would strip."""
    tok = sentencepiece_tokenizer()
    ids = tok.encode("some é words", add_special_tokens=False).ids
    stream = TextStream(tok)
    pieces = [stream.feed(token_id) for token_id in ids] + [stream.finish()]
    assert "".join(pieces) == " some é words" == f" {tok.decode(ids)}"
    assert pieces[5:9] == [" ", "", "é", " w"]


def test_byte_alphabet_is_that_of_the_library() -> None:
    table = byte_of_character()
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(table.values()) == list(range(256))


def test_generated_text_is_that_of_the_generated_ids(gpt: GPT, tokenizer: Tokenizer) -> None:
    sampling = Sampling(seed=4)
    ids = tokenizer.encode(TEXT[:9]).ids
    expected = tokenizer.decode(list(generate(gpt, ids, max_tokens=20, sampling=sampling)))
    pieces = list(generate_text(gpt, tokenizer, TEXT[:9], max_tokens=20, sampling=sampling))
    assert "".join(pieces) == expected
    assert all(pieces)


def test_text_can_start_like_a_document(gpt: GPT, tokenizer: Tokenizer) -> None:
    start = tokenizer.token_to_id("<|endoftext|>")
    ids = [start, *tokenizer.encode(TEXT[:9]).ids]
    expected = tokenizer.decode(list(generate(gpt, ids, max_tokens=9)))
    pieces = generate_text(gpt, tokenizer, TEXT[:9], max_tokens=9, start=[start])
    assert "".join(pieces) == expected
    with pytest.raises(ConfigError, match="prompt='': is empty"):
        generate_text(gpt, tokenizer, "", start=[start])


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(seed=1)])
def test_the_host_asks_for_nothing_but_the_tokens(gpt: GPT, sampling: Sampling) -> None:
    steps = generate_batch(gpt, [[5, 17], [7, 8]], max_tokens=3, sampling=sampling)
    next(steps)
    with Operators() as seen:
        next(steps)
    assert torch.ops.aten._local_scalar_dense.default not in seen.ran, "a GPU would make it wait"


def test_weights_that_are_not_finite_are_an_error() -> None:
    broken = make_model()
    with torch.no_grad():
        broken.final_norm.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        next(generate(broken, [5]))
