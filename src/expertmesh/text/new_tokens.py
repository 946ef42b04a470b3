"""Rows of a vocabulary that a fine-tune adds tokens to (`tokens.add`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from expertmesh.config.tokens import TokensConfig
from expertmesh.text.tokenizer import load_tokenizer, special_ids, tokens_to_add, until_files_change


@dataclass(frozen=True)
class GrownVocabulary:
    """Rows of a vocabulary that has grown; ids ascend."""

    used: int  # rows of the model that it grew from that have a token; in older runs all
    size: int  # V
    ids: tuple[int, ...]  # tokens of `tokens.add`
    new: tuple[int, ...]  # those of them that the tokenizer lacked, whose rows begin as the mean of the used ones

    @property
    def text(self) -> str:
        """The rows in words, for `of`."""
        parts: Sequence[Sequence[int]] = ((self.used, self.size), self.ids, self.new)
        return "; ".join(" ".join(map(str, part)) for part in parts)

    @classmethod
    def of(cls, text: str) -> "GrownVocabulary":
        """The rows of a `text`."""
        (used, size), ids, new = (tuple(map(int, part.split())) for part in text.split(";"))
        return cls(used, size, ids, new)


class NamedTokens(NamedTuple):
    """Tokens of `tokens.add` in a tokenizer."""

    ids: Mapping[str, int]  # by text
    known: tuple[str, ...]  # those that it had
    special: frozenset[str]  # those that are special, once added
    num_before: int  # its last id + 1 before they were added
    num_after: int


@until_files_change
def named_tokens(path: Path, tokens: TokensConfig) -> NamedTokens:
    """The tokens of `tokens.add` in the tokenizer of a tokenizer.json, to which they are added."""
    tokenizer = load_tokenizer(path)
    before = tokenizer.get_vocab(with_added_tokens=True)
    tokenizer.add_tokens(tokens_to_add(tokenizer, tokens.add, special=tokens.special))
    after = tokenizer.get_vocab(with_added_tokens=True)
    known = tuple(token for token in tokens.add if token in before)
    ids = {token: after[token] for token in tokens.add}
    special = frozenset(special_ids(tokenizer)).intersection(tokens.add)
    return NamedTokens(ids, known, special, *(max(vocab.values()) + 1 for vocab in (before, after)))


@until_files_change
def token_texts(path: Path, ids: tuple[int, ...]) -> tuple[str, ...]:
    """Texts of tokens of a tokenizer.json; numbers of those that it lacks."""
    tokenizer = load_tokenizer(path)
    return tuple(tokenizer.id_to_token(i) or f"<{i}>" for i in ids)


def grown_vocabulary(path: Path, tokens: TokensConfig, *, vocab_size: int) -> GrownVocabulary:
    """The vocabulary of a model with added tokens; all tokens of the files beside its tokenizer get rows.

    Args:
        path: the model's tokenizer.json.
        vocab_size: V of the model.
    """
    found = named_tokens(path, tokens)
    new = sorted(at for text, at in found.ids.items() if text not in found.known)
    ids, used = sorted(found.ids.values()), min(vocab_size, found.num_before)
    return GrownVocabulary(used, max(vocab_size, found.num_after), tuple(ids), tuple(new))
