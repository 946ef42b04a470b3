"""Weights of a language model whose vocabulary has grown, row by row while they are read."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box
from expertmesh.checkpoints.source import Stored, TensorSource, read_whole
from expertmesh.text.new_tokens import GrownVocabulary

TABLES = ("embedding.weight", "output.weight")
"""Matrices with a row per token."""
_ROWS = "token_rows."
_CHUNK = 8192


def is_token_rows(name: str) -> bool:
    """Whether a tensor is the rows of some tokens, which learn while their matrix rests."""
    return name.startswith(_ROWS)


def token_rows_of(table: str) -> str:
    """Name of the rows that learn in the place of a matrix's, by the matrix' name."""
    return f"{_ROWS}{table.removesuffix('.weight')}.rows"


class TrainedTokens(NamedTuple):
    """Tokens whose rows learned."""

    ids: Sequence[int] = ()  # ascending
    rows: Mapping[str, Tensor] = MappingProxyType({})  # (N, D) by the names of `TABLES`


def trained_tokens(learned: TensorSource, grown: GrownVocabulary | None) -> TrainedTokens:
    """Rows that learned beside adapters."""
    if grown is None:
        return TrainedTokens()
    names = {table: token_rows_of(table) for table in TABLES if token_rows_of(table) in learned.tensors}
    return TrainedTokens(grown.ids, {table: read_whole(learned, name) for table, name in names.items()})


class GrownRows:
    """Tensors of a model with a larger vocabulary, new rows of which are the mean of those with a token; a
    `TensorSource`.

    It has the rows of the named tokens as tensors of their own, too: see `token_rows_of`.
    """

    def __init__(self, source: TensorSource, grown: GrownVocabulary) -> None:
        self._source, self._grown = source, grown
        self._tables = {token_rows_of(name): name for name in TABLES if name in source.tensors}
        self._means: dict[tuple[str, int, int], Tensor] = {}

    @property
    def path(self) -> Path:
        """The folder."""
        return self._source.path

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """See `TensorSource`."""
        found = dict(self._source.tensors)
        for rows, table in self._tables.items():
            (_, width), dtype = found[table]
            found[table] = Stored((self._grown.size, width), dtype)
            found[rows] = Stored((len(self._grown.ids), width), dtype)
        return found

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """See `TensorSource.read`."""
        if name in self._tables:
            ids = self._grown.ids[box[0]]
            for place, row in enumerate(ids):
                self._read_rows(self._tables[name], (slice(row, row + 1), box[1]), into[place : place + 1])
        elif name in self._tables.values():
            self._read_rows(name, box, into)
        else:
            self._source.read(name, box, into)

    def _read_rows(self, table: str, box: Box, into: Tensor) -> None:
        """Copy a part of a matrix, whose new rows the model lacks or has without a token."""
        first, stop = box[0].start, box[0].stop
        known = min(stop, self._source.tensors[table].shape[0])
        if first < known:
            self._source.read(table, (slice(first, known), box[1]), into[: known - first])
        for row in (*range(max(known, first), stop), *(i for i in self._grown.new if first <= i < known)):
            into[row - first].copy_(self._mean(table, box[1]))

    def _mean(self, table: str, columns: slice) -> Tensor:
        """Mean of the rows that had a token, some columns of it."""
        key = table, columns.start, columns.stop
        if key not in self._means:
            total = sum(part.double().sum(0) for part in self._parts(table, columns))
            self._means[key] = torch.as_tensor(total) / self._grown.used
        return self._means[key]

    def _parts(self, table: str, columns: slice) -> Iterator[Tensor]:
        dtype = self._source.tensors[table].dtype
        for first in range(0, self._grown.used, _CHUNK):
            rows = slice(first, min(first + _CHUNK, self._grown.used))
            part = torch.empty(rows.stop - first, columns.stop - columns.start, dtype=dtype)
            self._source.read(table, (rows, columns), part)
            yield part
