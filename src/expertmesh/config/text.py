"""Options of text data."""

from typing import Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.config.run import check_not_empty


class TextConfig(Config):
    """Where the text comes from and how it becomes token sequences."""

    path: str | None = None
    """Text file or folder; none: the source of the running Python's standard library."""
    dataset: str | None = None
    """Name of a Hugging Face dataset (needs the 'train' extra); its 'text' column is used."""
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    """Share of the documents kept for validation; a document is on one side only."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Use only about this many bytes of the corpus, chosen by a hash of the document's name; none: all."""
    seq_len: int = Field(default=256, gt=0)
    """Tokens per training sequence; at most model.max_seq_len."""
    cache_dir: str | None = None
    """Folder for tokenizers and token shards; none: the user's cache folder."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("path", "dataset", "cache_dir"):
            check_not_empty(name, getattr(self, name))
        if self.path is not None and self.dataset is not None:
            raise FieldError(
                "dataset",
                self.dataset,
                f"conflicts with path={self.path}",
                "give only one of the two",
            )
        return self
