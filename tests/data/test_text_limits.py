"""A text that a model surely has no room for is refused before it is tokenised; no other text is."""

import random

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.calls import calls_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from expertmesh.errors import ConfigError
from expertmesh.text.chat import OwnFormat, TemplateFormat, latest_turns
from expertmesh.text.format import TextFormat
from expertmesh.text.limits import TextLimitError, TokenBound
from expertmesh.text.tokenizer import ids_of_text, train_tokenizer

WORDS = [
    "a",
    "bb",
    " ",
    "   ",
    "\n",
    "\t",
    "few words",
    "é",
    "e\u0301",
    "\u212b",
    "日本",
    "ﬁ",
    "\u2003",
    "<s>",
    "<e>",
    "𝐀",
    "İ",
    "\u1112\u1161\u11ab",
]


def sentencepiece(normalizer=True):
    """A tokenizer as of Llama: byte fallback, blanks as U+2581."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "▁▁", "▁▁▁▁"]
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["<s>"])
    return made


def byte_level(normalizer=None, *, before=None, **flags):
    """A byte-level tokenizer with merges and two added tokens."""
    made = train_tokenizer(["few words bb aa  " * 30, "日本 é" * 9], vocab_size=300)
    made.encode_special_tokens = False
    if before is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence([before, made.pre_tokenizer])
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken("<s>", **flags)])
    made.add_tokens([AddedToken("<e>", normalized=True)])
    return made


BOUNDED = {
    "bytes": byte_level,
    "bytes alone": byte_tokenizer,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizers.NFKC()),
    "lower case": lambda: byte_level(normalizers.Lowercase()),
    "stripped": lambda: byte_level(normalizers.Strip()),
    "without accents": lambda: byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "fewer blanks": lambda: byte_level(normalizers.Replace(" ", "")),
    "a token that takes blanks": lambda: byte_level(lstrip=True, rstrip=True),
    "split at blanks": lambda: byte_level(before=pre_tokenizers.WhitespaceSplit()),
    "split at words": lambda: byte_level(before=pre_tokenizers.Whitespace()),
    "split at digits": lambda: byte_level(before=pre_tokenizers.Digits(individual_digits=True)),
    "split and kept": lambda: byte_level(before=pre_tokenizers.Split(" ", "isolated")),
    "sentencepiece": sentencepiece,
    "sentencepiece of now": lambda: sentencepiece(normalizer=False),
}


def lossy():
    """A byte-level tokenizer without a token for a byte, which gets lost."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate("abc")}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    return made


UNBOUNDED = {
    "a lost byte": lossy,
    "removed": lambda: byte_level(before=pre_tokenizers.Split(" ", "removed")),
    "removed marks": lambda: byte_level(before=pre_tokenizers.Punctuation("removed")),
    "a separator": lambda: byte_level(before=pre_tokenizers.CharDelimiterSplit("b")),
    "whole words": lambda: Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "pieces of words": lambda: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "one letter for all": lambda: Tokenizer(models.BPE({"?": 0}, [], unk_token="?", fuse_unk=True)),
    "unigrams": lambda: Tokenizer(models.Unigram([("?", 0.0)], unk_id=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_that_has_room_is_refused(name):
    tokenizer, draw = BOUNDED[name](), random.Random(0)
    bound = TokenBound(tokenizer)
    longest = [token * 50 for token in tokenizer.get_vocab() if token.isascii()][-40:]
    texts = ["".join(draw.choices(WORDS, k=draw.randrange(40))) for _ in range(300)]
    for text in [*texts, *longest, *(word * 60 for word in WORDS)]:
        count = len(ids_of_text(tokenizer, text))
        bound.check(text, max(count, 1))
        most = bound.most_characters(max(count, 1))
        assert most is None or len(text) <= most
    with pytest.raises(TextLimitError, match="has more than .* and the model has room for 10;"):
        bound.check("ab" * 5 * bound.longest + "ab", 10)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_can_drop_text_gives_no_bound(name):
    bound = TokenBound(UNBOUNDED[name]())
    assert bound.longest is None and bound.most_characters(1) is None
    bound.check("a b" * 9999, 1)


TEMPLATE = "{% for m in messages %}<|user|>{{ m.content * m.times|default(1) }}{% endfor %}"
TEXT = "few words " * 99
USER = [{"role": "user", "content": TEXT}]
DOORS = {
    "a text": lambda text: text.prompt_ids(TEXT),
    "a text alone": lambda text: text.ids_of(TEXT),
    "a message": lambda text: text.chat_ids(USER),
    "a message that goes on": lambda text: text.chat_ids(USER, continues=True),
    "a message that a template makes longer": lambda text: text.chat_ids(
        [{"role": "user", "content": "few words", "times": 99}]
    ),
}


@pytest.mark.parametrize("window", [32, 33])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("door", DOORS)
def test_a_text_without_room_is_not_tokenised(door, is_own, window):
    """The longest token has 13 bytes, and the texts 891 or more."""
    tokenizer = byte_tokenizer()
    form = OwnFormat(tokenizer) if is_own else TemplateFormat(tokenizer, TEMPLATE, {})
    text = TextFormat(tokenizer, (), (), form, window)
    if is_own and door.endswith("longer"):
        return
    assert TokenBound(tokenizer).longest == 13

    with (
        calls_of(ids_of_text) as calls,
        pytest.raises(TextLimitError, match="tokens, and the model|characters, for which") as caught,
    ):
        DOORS[door](text)
    assert caught.value.code == "context_length_exceeded" and "\n" not in str(caught.value)
    assert not calls
    assert len(DOORS[door](TextFormat(tokenizer, (), (), form, None))) > 800


def test_an_interactive_conversation_forgets_turns_that_have_no_room():
    form = TemplateFormat(byte_tokenizer(), TEMPLATE + "<|assistant|>", {})
    last = {"role": "user", "content": "few"}
    talk = [*USER, {"role": "assistant", "content": "b"}, last]
    kept, ids = latest_turns(form, talk, most=20, window=24)
    assert kept == [last] and len(ids) < 20
    with pytest.raises(ConfigError, match="the model has no room"):
        latest_turns(form, USER, most=20, window=24)
