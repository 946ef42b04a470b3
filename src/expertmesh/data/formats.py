"""Formats of files with many documents: JSON, tables, Parquet, Megatron's token files.

`rows_of` gives the documents of a file, or None for a file that is one text. A new format is a function in `FORMATS`.
Packed files (`.gz`, `.zst`) are unpacked by `expertmesh.data.files`.
"""

import csv
import importlib.util
import io
import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from expertmesh.config.base import expanded
from expertmesh.data.conversation_lines import of_cell
from expertmesh.data.encoding import decoded
from expertmesh.data.files import UNPACKERS, TextFile, is_packed, opened, printable
from expertmesh.data.json_records import JSON, json_rows
from expertmesh.data.pairs import SIDES
from expertmesh.data.records import NoRecordsError, Row, found_shape, known_fields
from expertmesh.errors import ConfigError, named
from expertmesh.text.tokenizer import load_tokenizer


class Reading(NamedTuple):
    """Options for reading files; see `expertmesh.config.text.TextConfig`."""

    tokenizer: str | None = None  # tokenizer.json of token files
    encoding: str | None = None  # encoding of texts without a mark; None: UTF-8
    column: str | None = None  # field or column with the text, or the messages


_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def rows_of(path: Path, reading: Reading) -> list[Row] | None:
    """The documents in a file, each read when it is called; None: the file is one text."""
    ending = ending_of(path.name)
    if ending is None or (ending == ".bin" and not path.with_suffix(".idx").exists()):
        return None  # one text, or any other file of bytes
    return FORMATS[ending](path, reading)


def ending_of(name: str) -> str | None:
    """Ending of a file name that is a key of `FORMATS`, packed or not; None: there is none."""
    name = name.lower()
    return next((e for e in FORMATS if name.endswith((e, *(e + p for p in UNPACKERS)))), None)


def is_companion(path: Path) -> bool:
    """Whether a file is the .idx beside a .bin, which is read with it."""
    return path.suffix == ".idx" and path.with_suffix(".bin").exists()


def _json(path: Path, reading: Reading) -> list[Row]:
    is_lines = ending_of(path.name) != ".json"
    return json_rows(path, encoding=reading.encoding, column=reading.column, is_lines=is_lines)


def _table(path: Path, reading: Reading) -> list[Row]:
    """The rows of a .csv or .tsv, in memory; the first row names the columns."""
    text = decoded(TextFile(path).data(), reading.encoding)
    where = named("data.path", printable(str(path)))
    head = text.lstrip().partition("\n")[0]
    separator = "\t" if ending_of(path.name) == ".tsv" else max(",;\t", key=head.count)
    before = csv.field_size_limit(max(len(text), 1))
    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        found, line = [], 1
        for cells in lines:
            if cells:
                found.append((line, cells))
            line = lines.line_num + 1
    except csv.Error as error:
        raise NoRecordsError(f"is no table (line {line}: {error})", "; quote what has quotes in it") from None
    finally:
        csv.field_size_limit(before)
    if not found:
        return []
    (_, names), *rows = found
    names = [name.strip() for name in names]
    _check_once(names, where, reading.column)
    named_cells = partial(_named, names, column=reading.column)
    records = (named_cells(cells) for _, cells in rows)
    shape = found_shape(records, names, reading.column, what="its first line")
    for line, cells in rows:
        if len(cells) != len(names):
            raise ConfigError(
                f"{where}, line {line}: has {len(cells)} values for {len(names)} columns; quote what has "
                f"{separator!r} in it"
            )
    return [Row(partial(named_cells, cells), shape, "line", line, where) for line, cells in rows]


def _check_once(names: list[str], where: str, column: str | None) -> None:
    """Raise ConfigError if a column that is read occurs twice."""
    read = known_fields(column)
    if twice := next((n for n in names if n in read and names.count(n) > 1), None):
        raise ConfigError(f"{where}: has the column {twice!r} twice; rename one of the two")


def _named(names: list[str], cells: list[str], *, column: str | None) -> dict[str, Any]:
    pairs = zip(names, cells, strict=False)
    texts = {column, *(SIDES if set(SIDES) <= set(names) else ())}
    return {name: cell if name in texts else of_cell(name, cell) for name, cell in pairs}


def _parquet(path: Path, reading: Reading) -> list[Row]:
    """The rows of a Parquet file, in memory."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("data.path", path, "needs the package 'pyarrow'", "install it with: pip install pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        with opened(path) as file:
            packed = file.read() if is_packed(path) else None
        if not (path.stat().st_size if packed is None else packed):
            return []  # an empty file has no rows, as of every kind
        table = parquet.ParquetFile(path if packed is None else io.BytesIO(packed))
        names = table.schema_arrow.names
        _check_once(names, named("data.path", printable(str(path))), reading.column)
        batches = table.read([n for n in names if n in known_fields(reading.column)]).to_batches()
    except ArrowException as error:
        # as of any damaged file: a folder's is left out
        reason = " ".join(str(error).split())[:120]
        raise OSError(None, f"damaged: is no Parquet file ({reason})") from None
    readers = [partial(_cells, batch, i) for batch in batches for i in range(batch.num_rows)]
    if not readers:
        return []
    records = (read() for read in readers)
    shape = found_shape(records, names, reading.column, what="its table")
    where = named("data.path", printable(str(path)))
    return [Row(read, shape, "row", number, where, reading.encoding) for number, read in enumerate(readers, 1)]


def _cells(batch: Any, index: int) -> dict[str, Any]:
    """A row of a table without nulls, which stand for fields that a message lacks."""
    names = batch.schema.names
    return {name: without_none(batch.column(name)[index].as_py()) for name in names}


def without_none(value: Any) -> Any:
    """A value of a table without the null fields of its objects."""
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


def _decoded(path: Path, tokenizer: str, dtype: str, start: int, count: int) -> str:
    """The text of a document of a token file."""
    ids = np.fromfile(path, dtype, count=count, offset=start)
    text: str = _tokenizer(tokenizer).decode(ids.tolist(), skip_special_tokens=True)
    return text


@cache
def _tokenizer(path: str) -> Any:
    return load_tokenizer(expanded(path))


def _megatron(path: Path, reading: Reading) -> list[Row]:
    """The documents of Megatron's NAME.bin with its NAME.idx, decoded to text.

    The index: magic, version (8 bytes), type (1), sequences (8), document borders (8), then the length of each sequence
    (int32), its first byte (int64), and the number of the first sequence of each document (int64).
    """
    tokenizer = reading.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "data.path",
            path,
            "holds token ids",
            f"name the tokenizer.json that made them: {named('data.tokenizer', 'FILE')}",
        )
    index = path.with_suffix(".idx")
    data = index.read_bytes()
    head = len(_MAGIC) + struct.calcsize("<QBQQ")
    if not data.startswith(_MAGIC) or len(data) < head:
        raise ConfigError("data.path", path, f"{index.name} beside it is no Megatron index", "write it again")
    _, code, count, borders = struct.unpack_from("<QBQQ", data, len(_MAGIC))
    if code not in _TYPES or len(data) < head + 12 * count + 8 * borders:
        raise ConfigError("data.path", path, f"{index.name} is damaged", "write it again")
    sizes = np.frombuffer(data, "<i4", count, head)
    starts = np.frombuffer(data, "<i8", count, head + 4 * count)
    documents = np.frombuffer(data, "<i8", borders, head + 12 * count)
    item = np.dtype(_TYPES[code]).itemsize
    if len(documents) and not 0 <= documents.min() <= documents.max() <= count:
        raise ConfigError("data.path", path, f"{index.name} is damaged", "write it again")
    last_start = path.stat().st_size - item * sizes.astype(np.int64)
    if ((sizes < 0) | (starts < 0) | (starts > last_start)).any():
        raise ConfigError("data.path", path, f"{index.name} is of a longer file, or damaged", "copy both again")
    rows: list[Row] = []
    where = named("data.path", printable(str(path)))
    for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        if last > first:
            num_tokens = int(sizes[first:last].sum())  # its sequences lie one after the other
            start = int(starts[first])
            read = partial(_decoded, path, tokenizer, _TYPES[code], start, num_tokens)
            rows.append(Row(read, None, "document", len(rows) + 1, where))
    return rows


FORMATS: dict[str, Callable[[Path, Reading], list[Row]]] = {
    **dict.fromkeys(JSON, _json),
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".bin": _megatron,
}
"""Functions that read the documents of files, by ending."""
MAY_BE_TEXT = frozenset({".json", ".csv", ".tsv"})
"""Endings of files that are learned as text if they hold no known records, since programs and texts come with such
files."""
