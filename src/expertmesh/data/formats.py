"""Files with many texts in them: JSON lines, Parquet, Megatron's token files. Each becomes the documents that it holds.

The seam: `rows_of` gives the readers of a file's texts, or None for a file that is one text. A new format is a function in
`FORMATS`. The readers of a file of conversations are `ConversationLine`s. Packed files (`.gz`, `.zst`) are unpacked by `expertmesh.data.files` before.
"""

import importlib.util
import io
import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from expertmesh.config.base import expanded, parse_json
from expertmesh.data.conversation_lines import ConversationLine, holds_conversation
from expertmesh.data.files import is_packed, opened, printable
from expertmesh.data.news import Progress
from expertmesh.data.tokenizer import load_tokenizer
from expertmesh.errors import ConfigError, named

Reader = Callable[[], str | None]

COLUMN = "text"
"""The field, or column, that holds a document."""

_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def rows_of(path: Path, *, tokenizer: str | None) -> list[Reader] | None:
    """The texts in a file, each read when it is asked for; None: the file is one text.

    Args:
        path: of the file.
        tokenizer: tokenizer.json of token files.

    Raises:
        ConfigError: a package or a file that the format needs is missing, or the file is not what its name says.
        OSError: it cannot be read.
    """
    name = path.name.lower()
    ending = next((e for e in FORMATS if name.endswith((e, f"{e}.gz", f"{e}.zst"))), None)
    if ending is None or (ending == ".bin" and not path.with_suffix(".idx").exists()):
        return None  # one text, or any other file of bytes
    return FORMATS[ending](path, tokenizer)


def is_companion(path: Path) -> bool:
    """Whether a file belongs to another one that is read: the .idx beside a .bin."""
    return path.suffix == ".idx" and path.with_suffix(".bin").exists()


def _line(path: Path, start: int, length: int) -> bytes:
    """One line of a file that is not packed."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _field(read: Callable[[], bytes]) -> str:
    """The text in a line of JSON."""
    try:
        text = parse_json(read()).get(COLUMN)
    except (ValueError, AttributeError):
        raise OSError(None, "not a JSON object") from None
    if not isinstance(text, str):
        raise OSError(None, f"no text in the field {COLUMN!r}")
    return text


def _json_lines(path: Path, _: str | None) -> list[Reader]:
    """Texts, or conversations where the first object of the file is one."""
    readers: list[Reader] = []
    start, packed = 0, is_packed(path)
    talks: bool | None = None
    where = named("data.path", printable(str(path)))
    with opened(path) as file:
        for number, line in enumerate(Progress("looked through").over(file, len), 1):
            if line.strip():
                # a packed file cannot be entered in the middle
                read = partial(bytes, line) if packed else partial(_line, path, start, len(line))
                if talks is None:
                    talks = holds_conversation(line)
                readers.append(
                    ConversationLine(number, where, read) if talks else partial(_field, read)
                )
            start += len(line)
    return readers


def given(value: Any) -> str | None:
    """A value if it is a text."""
    return value if isinstance(value, str) else None


def _parquet(path: Path, _: str | None) -> list[Reader]:
    """The column of a Parquet file, in memory."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "data.path", path, "needs the package 'pyarrow'", "install it with: pip install pyarrow"
        )
    from pyarrow import ArrowException, parquet

    try:
        with opened(path) as file:
            table = parquet.ParquetFile(io.BytesIO(file.read()) if is_packed(path) else path)
        names = table.schema_arrow.names
        if COLUMN in names:
            return [partial(given, value) for value in table.read([COLUMN])[COLUMN].to_pylist()]
    except ArrowException as error:
        raise ConfigError(
            "data.path",
            path,
            f"is no Parquet file ({' '.join(str(error).split())[:120]})",
            "check it",
        ) from None
    raise ConfigError(
        "data.path",
        path,
        f"needs a column {COLUMN!r}, has {', '.join(names)}",
        "rename the one with the text",
    )


def _decoded(path: Path, tokenizer: str, dtype: str, start: int, count: int) -> str:
    """One document of a token file."""
    ids = np.fromfile(path, dtype, count=count, offset=start)
    text: str = _tokenizer(tokenizer).decode(ids.tolist(), skip_special_tokens=True)
    return text


@cache
def _tokenizer(path: str) -> Any:
    return load_tokenizer(expanded(path))


def _megatron(path: Path, tokenizer: str | None) -> list[Reader]:
    """The documents of Megatron's NAME.bin with its NAME.idx, back as text.

    The index: magic, version (8 bytes), type (1), sequences (8), document borders (8), then the length of each sequence (int32),
    its first byte (int64), and the number of the first sequence of each document (int64).
    """
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
        raise ConfigError(
            "data.path", path, f"{index.name} beside it is no Megatron index", "write it again"
        )
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
        raise ConfigError(
            "data.path", path, f"{index.name} is of a longer file, or damaged", "copy both again"
        )
    readers: list[Reader] = []
    for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        if last > first:
            num_tokens = int(sizes[first:last].sum())  # its sequences lie one after the other
            start = int(starts[first])
            readers.append(partial(_decoded, path, tokenizer, _TYPES[code], start, num_tokens))
    return readers


FORMATS: dict[str, Callable[[Path, str | None], list[Reader]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".bin": _megatron,
}
"""How the texts of files are read, by the ending of their names."""
