"""Rows of a vocabulary that a fine-tune adds tokens to (`tokens.add`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertmesh.config.tokens import TokensConfig
from expertmesh.text.tokenizer import add_named, load_tokenizer


@dataclass(frozen=True)
class GrownVocabulary:
    """Rows of a vocabulary that has grown; ids ascend."""

    before: int  # V of the model that it grew from
    size: int  # V
    ids: tuple[int, ...]  # tokens of `tokens.add`
    new: tuple[int, ...]  # those of them that the tokenizer lacked, whose rows begin as the mean of the model's

    @property
    def text(self) -> str:
        """The rows in words, for `of`."""
        parts: Sequence[Sequence[int]] = ((self.before, self.size), self.ids, self.new)
        return "; ".join(" ".join(map(str, part)) for part in parts)

    @classmethod
    def of(cls, text: str) -> "GrownVocabulary":
        """The rows of a `text`."""
        (before, size), ids, new = (tuple(map(int, part.split())) for part in text.split(";"))
        return cls(before, size, ids, new)


def grown_vocabulary(path: Path, tokens: TokensConfig, *, vocab_size: int) -> GrownVocabulary:
    """The vocabulary of a model with added tokens; all tokens of the files beside its tokenizer get rows.

    Args:
        path: the model's tokenizer.json.
        vocab_size: V of the model.
    """
    tokenizer = load_tokenizer(path)
    known = add_named(tokenizer, tokens)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    ids = sorted(vocab[token] for token in tokens.add)
    new = sorted(vocab[token] for token in tokens.add if token not in known)
    return GrownVocabulary(vocab_size, max(vocab_size, max(vocab.values()) + 1), tuple(ids), tuple(new))
