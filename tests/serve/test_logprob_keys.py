"""Logprobs of a completion: every token has a key, and an offset where its text begins."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from expertmesh.engine.output import Logprob, RequestOutput
from expertmesh.engine.request import SamplingParams
from expertmesh.serve.reading import Job
from expertmesh.serve.writing import TokenTexts, Writer
from expertmesh.text.stream import byte_of_character


def byte_tokenizer():
    """Ids 0 ... 255 are bytes; two more have the texts of others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken("<|end|>", special=True)])
    found.add_tokens([AddedToken(" ", normalized=False), AddedToken("token_id:3")])
    return found


TOKENIZER = byte_tokenizer()


def ids_of(data):
    """Ids of bytes, one for each."""
    names = {byte: character for character, byte in byte_of_character().items()}
    return [TOKENIZER.token_to_id(names[byte]) for byte in data]


def logprobs(ids, tops, *, as_ids=False):
    """The field `logprobs` of an answer of these tokens."""
    entries = tuple(Logprob(token, dict(top).get(token, -2.5), top) for token, top in zip(ids, tops, strict=True))
    output = RequestOutput("0", 0, (5,), tuple(ids), "", "length", logprobs=entries)
    texts = TokenTexts(TOKENIZER, as_ids=as_ids)
    job = Job([[5]], [], [SamplingParams()])
    writer = Writer(job, "m", texts, wants_logprobs=True, wants_ids=False, is_chat=False)
    return writer.whole({0: output})["choices"][0]["logprobs"]


PARTS = ids_of("日本".encode())
BLANK = TOKENIZER.token_to_id(" ")  # beside the byte's own token
TOPS = {
    "parts of characters": (PARTS[1], PARTS),
    "the chosen one behind the others": (PARTS[1], [PARTS[0], PARTS[2]]),
    "a part of a character is likeliest": (*ids_of(b"a"), [PARTS[0], PARTS[2]]),
    "letters": (*ids_of(b"a"), ids_of(b"abc")),
    "none but the chosen one": (PARTS[1], []),
    "equal texts": (BLANK, [*ids_of(b" "), BLANK, *ids_of(b"xy")]),
    "equal texts, none chosen": (PARTS[0], [*ids_of(b" "), BLANK]),
    "a token that looks like a key": (PARTS[0], [TOKENIZER.token_to_id("token_id:3"), 3, *PARTS]),
}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(("chosen", "likely"), TOPS.values(), ids=TOPS)
def test_no_token_is_lost(chosen, likely, as_ids):
    top = tuple((token, -0.5 * place) for place, token in enumerate(likely))
    found = logprobs([chosen], [top], as_ids=as_ids)
    (by_text,), (text,) = found["top_logprobs"], found["tokens"]
    values = dict(top) | {chosen: dict(top).get(chosen, -2.5)}
    assert sorted(by_text.values()) == sorted(values.values())
    assert by_text[text] == values[chosen], "the key of the chosen token is its entry of tokens"


BYTES = {
    "letters": (b"abc", [0, 1, 2]),
    "whole characters": ("aé日b".encode(), [0, 1, 1, 2, 2, 2, 3]),
    "a beginning that is broken off": (b"a\xe6b", [0, 1, 2]),
    "two bytes broken off": (b"\xe6\x97ab", [0, 0, 1, 2]),
    "a beginning behind a beginning": (b"\xe6\xe6\x97\xa5b", [0, 1, 1, 1, 2]),
    "a byte that begins nothing": (b"a\x97\x97b", [0, 1, 2, 3]),
    "broken off at the end": (b"ab\xe6", [0, 1, 2]),
    "U+FFFD itself": ("a\ufffdb".encode(), [0, 1, 1, 1, 2]),
    "four bytes, three there": (b"\xf0\x9f\x98x", [0, 0, 0, 1]),
}


@pytest.mark.parametrize(("data", "offsets"), BYTES.values(), ids=BYTES)
def test_offsets_are_where_texts_begin(data, offsets):
    assert logprobs(ids_of(data), [()] * len(data))["text_offset"] == offsets
    text = data.decode(errors="replace")
    for byte, offset in zip(data, offsets, strict=True):
        if byte < 128:
            assert text[offset] == chr(byte)
