"""Text of token ids as they come: whole characters, special tokens silent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sentencepiece_vocabulary import sentencepiece_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
