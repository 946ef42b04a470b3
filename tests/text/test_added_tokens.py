"""Tokens that are added to a tokenizer: pieces of its vocabulary as in transformers, and texts that no token can be."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from expertmesh.errors import ConfigError
from expertmesh.text.tokenizer import load_tokenizer, tokens_to_add, train_tokenizer, until_files_change

TEXT = "a tool and tools in a toolbox, <plan> of a stool"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["tool tools of a toolbox"] * 9, vocab_size=300, marks=["<|user|>"]).save(str(path))
    return path


@pytest.mark.parametrize("special", [False, True])
def test_a_piece_of_the_vocabulary_becomes_an_added_token_as_in_transformers(special, file):
    ours, theirs = load_tokenizer(file), PreTrainedTokenizerFast(tokenizer_file=str(file))
    before, size = ours.token_to_id("tool"), ours.get_vocab_size()
    ours.add_tokens(tokens_to_add(ours, ["tool", "<|user|>", "<plan>"], special=special))
    theirs.add_tokens(["tool", "<plan>"], special_tokens=special)
    added = ours.get_added_tokens_decoder()
    assert {i: (t.content, t.special) for i, t in added.items()} == {
        i: (t.content, t.special) for i, t in theirs.added_tokens_decoder.items()
    }
    assert added[before].content == "tool" and ours.token_to_id("<plan>") == size == ours.get_vocab_size() - 1
    ours.encode_special_tokens = False  # as transformers encodes
    ids = ours.encode(TEXT).ids
    assert ids == theirs.encode(TEXT) and ids.count(before) == 4
    assert ours.decode(ids) == (TEXT.replace("tool", "").replace("<plan>", "") if special else TEXT)


def test_texts_that_no_token_can_be_are_one_line(file):
    tokenizer = load_tokenizer(file)
    for text, found in (("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{REPLACEMENT CHARACTER}"), ("\u0120tool", " tool")):
        with pytest.raises(ConfigError, match=f"tokens.add={text}: is a piece of the vocabulary for '{found}'; choose"):
            tokens_to_add(tokenizer, [text], special=False)
    tokenizer.add_tokens(["<plan>"])
    with pytest.raises(ConfigError, match="tokens.add=<plan>: is an added token of the tokenizer that is not special;"):
        tokens_to_add(tokenizer, ["<plan>"], special=True)


def test_a_result_is_kept_until_the_tokenizer_or_a_file_beside_it_changes(file):
    read = []

    @until_files_change
    def ids(path, text):
        read.append(path)
        return load_tokenizer(path).encode(text).ids

    before = ids(file, "<plan>")
    assert ids(file, "<plan>") == before != ids(file, "tool") and len(read) == 2
    values = {"added_tokens_decoder": {"300": {"content": "<plan>", "special": False}}}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(values))
    assert len(before) > 1 == len(ids(file, "<plan>")) and len(read) == 3
    train_tokenizer(["other"] * 9, vocab_size=300).save(str(file))
    assert ids(file, "other") == ids(file, "other") and len(read) == 4
