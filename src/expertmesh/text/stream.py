"""Incremental decoding of token ids to text, without incomplete characters."""

import codecs
import re
from collections.abc import Collection
from functools import cache

from tokenizers import Tokenizer

from expertmesh.text.tokenizer import BLANK, is_byte_level

# Bytes that byte-level BPE (Radford et al. 2019, 2.2) writes as their own characters; the other 68 become 256, 257, ...
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))

_BYTE = re.compile("<0x[0-9A-F]{2}>")


@cache
def byte_of_character() -> dict[str, int]:
    """Byte of each character in a byte-level vocabulary."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    table = {chr(byte): byte for byte in _PRINTABLE}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class TextStream:
    """Decoder of one token sequence, which holds back the bytes of a character until it is complete.

    Bytes that are not UTF-8 become U+FFFD. Special tokens (end of text, ...) are left out. The joined pieces are the
    text of the whole sequence, with a blank at its beginning kept.

    Args:
        tokenizer: byte-level BPE, or a tokenizer that writes blanks as U+2581 and single bytes as <0x0A>
            (SentencePiece).
    """

    def __init__(self, tokenizer: Tokenizer, kept: Collection[int] = ()) -> None:
        """Start an empty stream."""
        self._tokenizer = tokenizer
        self._special = {  # without names, which would take 0.2 ms of each answer for 1,000 tokens
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._kept = frozenset(kept) & self._special
        self._is_byte_level = tokenizer.decoder is None or is_byte_level(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" in the middle of a character."""
        if token_id in self._special and token_id not in self._kept:
            return ""
        return self._decoder.decode(self.bytes_of(token_id))

    def breaks(self, token_id: int) -> bool:
        """Whether bytes held back become U+FFFD before this token's own text, because its bytes do not continue
        them."""
        held, _ = self._decoder.getstate()
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if not held or not token:
            return False
        try:
            codecs.getincrementaldecoder("utf-8")().decode(held + self._bytes(token)[:1])
        except UnicodeDecodeError:
            return True
        return False

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a single token, without context: the name of a special token, b"" for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in self._special else self._bytes(token)

    def _bytes(self, token: str) -> bytes:
        """Bytes of a token of the vocabulary."""
        if self._is_byte_level:
            table = byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode()  # added to the vocabulary as plain text
        if _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(BLANK, " ").encode()

    def finish(self) -> str:
        """Text of the bytes held back: U+FFFD for an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)
