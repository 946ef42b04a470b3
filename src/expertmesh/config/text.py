"""Options of text data."""

import re
from typing import Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, expanded
from expertmesh.config.run import check_encoding
from expertmesh.errors import named


class TextConfig(Config):
    """Source of the text, its tokenizer and its token sequences."""

    path: str | tuple[str, ...] | None = None
    """File of text or conversations (.txt, .jsonl, .json, .csv, .tsv, .parquet, each also .gz or .zst), folder or pattern; repeated for several, PATH:2 to use one twice per epoch; none: the source of Python's standard library."""
    encoding: str | None = None
    """Encoding of the text, as Python calls it (latin-1, cp1252, shift_jis, utf-16-le); none: UTF-8. A mark at the beginning of a file counts more."""
    column: str | None = None
    """Field or column with the text, or the list of messages; none: text, or a conversation in one of the shapes that are known."""
    tokenizer: str | None = None
    """The tokenizer.json with which Megatron's .bin and .idx files were made; they become text again."""
    dataset: str | None = None
    """Name of a Hugging Face dataset (needs the 'train' extra), read as a table is: see column."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of the documents kept for validation; a document is on one side only."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Use only about this many bytes of the corpus, chosen by a hash of the document's name; none: all."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens per training sequence; at most model.max_seq_len."""
    document_mask: bool = False
    """Tokens attend within their own document only, where a sequence has several."""
    pack: bool = False
    """Several conversations per sequence, each attending to itself only, so that a batch has more of them and less padding."""
    encode_with: str | None = None
    """The byte-level tokenizer.json with which the text becomes tokens; none: one is learned from the corpus."""
    cache_dir: str | None = None
    """Folder for tokenizers and token shards; none: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_encoding("encoding", self.encoding)
        paths = (self.path,) if isinstance(self.path, str) else self.path or ()
        self.require(self.path != (), "path", "must name a text", "leave it out, or name one")
        if self.path is None:
            self.refuse_idle("encoding", "has no effect without path", "leave it out")
            if self.dataset is None:
                self.refuse_idle("column", "has no effect without path or dataset", "leave it out")
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
