"""From token ids of a byte-level BPE to text, piece by piece, never half a character."""

import codecs
from functools import cache

from tokenizers import Tokenizer

# The bytes that byte-level BPE (Radford et al. 2019, 2.2) writes as themselves; the other 68 become 256, 257, ...
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@cache
def byte_of_character() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, inverted."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    table = {chr(byte): byte for byte in _PRINTABLE}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class TextStream:
    """Turns token ids into text as they come, and holds back the bytes of a character that is not complete yet.

    Bytes that are no UTF-8 become U+FFFD. Special tokens (end of text, ...) are left out. The pieces joined are the text of
    the ids joined.

    Args:
        tokenizer: byte-level BPE.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts with no text."""
        self._tokenizer = tokenizer
        self._special = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; often "" in the middle of a character."""
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        table = byte_of_character()
        return self._decoder.decode(bytes(table[character] for character in token))

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)
