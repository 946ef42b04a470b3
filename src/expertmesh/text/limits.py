"""Limits of a text that are known before it is tokenised: tokenizing takes long, and a text that is refused need not
wait."""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from expertmesh.errors import ConfigError

TOO_LONG = "context_length_exceeded"
IN_NO_TEXT = set("\xc0\xc1\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff")
"""Characters of the bytes that never occur in UTF-8."""
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256) if chr(byte) not in IN_NO_TEXT)
"""Tokens of SentencePiece for single bytes, those that occur in texts."""
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_SPLITTING = ("Split", "Punctuation")
"""Pre-tokenizers that keep the text, and those that keep it unless their behavior is Removed."""
_DROPPING_BLANKS = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")


class TextLimitError(ConfigError):
    """A text that the model has no room for, or a chat template that takes more than it may. `text`: the whole line."""

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(text)
        self.code = code

    def of(self, what: str) -> "TextLimitError":
        """A copy of the error that begins with the name of an argument."""
        return TextLimitError(f"{what}: {self}", code=self.code)


class TokenBound:
    """Lower bound of the number of tokens of a text, from its bytes and the longest token.

    It holds where every byte that the normalizer leaves becomes part of a token: byte-level BPE with all bytes, and BPE
    with byte fallback (SentencePiece). Blanks are not counted where the tokenizer can drop them. Any other tokenizer
    can merge or drop text of any length (an unknown word is one token), and gives no bound.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """Settings of the pre-tokenizers."""
        given = self._tokenizer.pre_tokenizer
        return [] if given is None else [*_flat(json.loads(given.__getstate__()))]

    @cached_property
    def _drops_blanks(self) -> bool:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return any(token.lstrip or token.rstrip for token in added) or any(
            step["type"] in _DROPPING_BLANKS for step in self._steps
        )

    @cached_property
    def longest(self) -> int | None:
        """Bytes of normalized text that one token can stand for; None: any number."""
        model, vocab = self._tokenizer.model, self._tokenizer.get_vocab(with_added_tokens=False)
        is_byte_level = any(step["type"] == "ByteLevel" for step in self._steps)
        needed = {*pre_tokenizers.ByteLevel.alphabet()} - IN_NO_TEXT if is_byte_level else {*BYTE_TOKENS}
        is_whole = isinstance(model, models.BPE) and (is_byte_level or model.byte_fallback)
        if not is_whole or not needed <= vocab.keys() or not all(map(_keeps, self._steps)):
            return None
        sizes = (len(token) if is_byte_level else len(token.encode()) for token in vocab)
        added = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
        both = [*added, *map(self._normalized, added)]
        return max([*sizes, *(len(token.encode()) for token in both)])

    def _normalized(self, text: str) -> str:
        found = self._tokenizer.normalizer
        return text if found is None else str(found.normalize_str(text))

    def most_characters(self, window: int | None) -> int | None:
        """Characters of the longest text that can have `window` tokens; None: not known without normalizing it."""
        changes = self._tokenizer.normalizer is not None or self._drops_blanks
        if window is None or changes or self.longest is None:
            return None
        return window * self.longest

    def check(self, text: str, window: int | None) -> None:
        """Raise TextLimitError if a text surely has more tokens than a window."""
        if window is None or 4 * len(text) <= window or self.longest is None:
            return
        most = window * self.longest
        if _size(text) <= most:
            return
        kept = _size(self._normalized("".join(text.split()) if self._drops_blanks else text))
        if kept > most:
            raise TextLimitError(
                f"has more than {kept // self.longest} tokens, and the model has room for {window}; shorten it",
                code=TOO_LONG,
            )


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for one in step["pretokenizers"]:
            yield from _flat(one)
    else:
        yield step


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all of a text but blanks."""
    if step["type"] in _SPLITTING:
        return step.get("behavior") != "Removed"
    return step["type"] in (*_KEEPING, *_DROPPING_BLANKS)
