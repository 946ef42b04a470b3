"""Options of text data."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, expanded
from expertmesh.config.fields import Spelling
from expertmesh.config.run import check_encoding
from expertmesh.errors import named

Completions = Literal["chat", "text"]


class TextConfig(Config):
    """Source of the text, its tokenizer and its token sequences."""

    path: Annotated[str | tuple[str, ...] | None, Spelling("PATH")] = None
    """Files, folders or glob patterns of text or conversations (.txt, .jsonl, .json, .csv, .tsv, .parquet, also .gz or
    .zst); PATH:2 is used twice per epoch; none: the source of Python's standard library."""
    encoding: Annotated[str | None, Spelling("NAME")] = None
    """Text encoding by its Python name (latin-1, cp1252, shift_jis, utf-16-le); a byte-order mark takes precedence;
    none: UTF-8."""
    column: Annotated[str | None, Spelling("NAME")] = None
    """Field or column with the text or the list of messages; none: text, or a known conversation format."""
    tokenizer: Annotated[str | None, Spelling("FILE")] = None
    """tokenizer.json of pretokenized Megatron .bin/.idx data; none: text data."""
    dataset: Annotated[str | None, Spelling("NAME")] = None
    """Name of a Hugging Face dataset, whose text is in data.column; needs the extra `train`; none: data.path."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Fraction of the documents for validation."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Maximum size of the corpus in bytes; documents are chosen by a hash of their names; none: all documents."""
    seq_len: int = Field(default=256, gt=0)
    """Sequence length in training, in tokens; at most model.max_seq_len."""
    completions: Completions = "chat"
    """Form of prompt-completion records: chat, a user and an assistant turn of the chat template; text, plain text with
    the loss on the completion and EOS."""
    document_mask: bool = False
    """Whether attention is limited to a token's own document."""
    pack: bool = False
    """Whether several conversations are packed per sequence, without attention across them."""
    encode_with: Annotated[str | None, Spelling("FILE")] = None
    """tokenizer.json that encodes the text (byte-level or SentencePiece); none: a tokenizer is trained on the
    corpus."""
    cache_dir: Annotated[str | None, Spelling("DIR")] = None
    """Cache folder for tokenizers and token shards; none: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_encoding("encoding", self.encoding)
        paths = (self.path,) if isinstance(self.path, str) else self.path or ()
        self.require(self.path != (), "path", "must name a text", "leave it out, or name one")
        if self.path is None:
            self.refuse_idle("encoding", "has no effect without path", "leave it out")
            if self.dataset is None:
                for name in ("column", "completions"):
                    self.refuse_idle(name, "has no effect without path or dataset", "leave it out")
        self.require(
            self.tokenizer is None or any(map(_may_hold_tokens, paths)),
            "tokenizer",
            f"is that of .bin files, and {named('data.path')} names none",
            "leave it out: a tokenizer is trained on the text",
        )
        self.require(
            self.path is None or self.dataset is None,
            "dataset",
            f"conflicts with {named('data.path', self.path)}",
            "give only one of the two",
        )
        return self


def _may_hold_tokens(path: str) -> bool:
    return bool(re.search(r"\.bin(:[0-9.]+)?$|[*?\[]", path)) or expanded(path).is_dir()
