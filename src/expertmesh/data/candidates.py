"""Documents that a configuration names by files, folders, patterns and datasets, each with a function that reads it.

Files in a format of `expertmesh.data.formats` hold many documents. A single file of text is cut into several.
"""

import importlib.util
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.config.text import TextConfig
from expertmesh.data.data_progress import Progress
from expertmesh.data.encoding import MOST_OF_A_MARK, NotTextError, decoded, encoding_of, remedy
from expertmesh.data.files import (
    NOT_A_FILE,
    NOT_READABLE,
    LeftOut,
    TextFile,
    find_files,
    is_packed,
    printable,
)
from expertmesh.data.formats import (
    MAY_BE_TEXT,
    Reading,
    ending_of,
    is_companion,
    rows_of,
    without_none,
)
from expertmesh.data.json_records import json_in
from expertmesh.data.paths import WeightedPath, find_paths
from expertmesh.data.records import TEXT, NoRecordsError, Row, found_shape
from expertmesh.errors import ConfigError, named

_PIECE_BYTES = 65_536
_LEAST_PIECES = 40
_LEAST_PIECE_BYTES = 512
_LINES = "files hold JSON objects on lines, which their names do not say"
ENTRIES = "files hold JSON arrays or objects over several lines, which their names do not say"
"""Reason by which JSON that is not on lines is counted."""
_NO_RECORDS = "files hold no records that are read"


class CandidateDocument(NamedTuple):
    """A document that may be chosen."""

    name: str  # see `Document`
    read: Callable[[], str]  # returns its text, or raises NotTextError
    place: int = 0  # see `Document`
    own_name: str = ""  # see `Document`; empty: the name
    shown: str = ""  # its place, for display; empty: the name


@dataclass(frozen=True)
class Notices:
    """Files that a user hears of: left out, or learned as plain text."""

    left_out: LeftOut = field(default_factory=LeftOut)  # files that are not used
    # files that may hold records and are learned as plain text
    as_text: LeftOut = field(default_factory=lambda: LeftOut(what="learned as text"))
    # files with records but no ending for it, which are learned as plain text
    unnamed: LeftOut = field(default_factory=lambda: LeftOut(what="learned as text"))


def find_documents(config: TextConfig, notices: Notices) -> tuple[str, list[CandidateDocument]]:
    """Description of the text, and its documents, before any is read. `notices`: receives the files that are left
    out."""
    if config.dataset is not None:
        return f"dataset {config.dataset}", _dataset(config.dataset, config.column)
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        # These files are never cut, so that a program is on one side.
        files = [path for path in find_files(root, follow_links=False)[0] if path.suffix == ".py"]
        return "the source of Python's standard library", _whole(root, files, config)
    places = find_paths(config.path)
    if len(places) == 1:
        return places[0].name, _of_place(places[0], config, notices)
    candidates = []
    for number, place in enumerate(places):
        for c in _of_place(place, config, notices):
            shown = f"{place.name}: {c.shown}" if c.shown else ""
            candidates.append(CandidateDocument(f"{number}:{c.name}", c.read, number, c.name, shown))
    return f"{len(places)} places from {places[0].name}", candidates


def _of_place(place: WeightedPath, config: TextConfig, notices: Notices) -> list[CandidateDocument]:
    """Documents of a file or folder; the matches of a pattern are treated as one folder."""
    root, files, left_out = place.root, list[Path](), notices.left_out
    before = left_out.total
    if len(place.paths) == 1:
        (root,) = place.paths
        if not root.is_dir():
            return _of_one_file(root, config, notices)
    for path in place.paths:
        if path.is_dir():
            found, without = find_files(path)
            left_out.add_all(without)
            files += [path / p for p in found if not any(n.startswith(".") for n in p.parts)]
        elif path.is_file():
            files.append(path)
        else:
            left_out.add(NOT_A_FILE, str(path))
    files = [path for path in files if not is_companion(path)]
    is_whole = left_out.total == before
    if not files:
        why = "" if is_whole else f" ({left_out})"
        raise ConfigError(f"{option_of(config)}: the folder has no files{why}; give text files")
    if len(files) == 1 and is_whole:
        return _of_one_file(files[0], config, notices)
    names = [path.relative_to(root) for path in files]
    return list(_of_folder(root, names, config, notices, ending=ending_of(place.name)))


def _rows(path: Path, name: str, config: TextConfig) -> list[CandidateDocument] | None:
    """Documents of a file that holds many; None: the file is one text."""
    rows = rows_of(path, Reading(config.tokenizer, config.encoding, config.column))
    return None if rows is None else list(_of_rows(rows, name))


def _of_rows(rows: Iterable[Row], name: str) -> Iterator[CandidateDocument]:
    for index, row in enumerate(rows):
        shown = row.at(name)
        yield CandidateDocument(shown if row.kind != TEXT else f"{name}#{index:09d}", row, shown=shown)


def _whole(root: Path, found: Iterable[Path], config: TextConfig) -> list[CandidateDocument]:
    encoding = config.encoding
    return [CandidateDocument(p.as_posix(), TextFile(root / p, encoding=encoding)) for p in found]


def _of_one_file(path: Path, config: TextConfig, notices: Notices) -> list[CandidateDocument]:
    """Documents of a single file; errors in it are raised, where those in a folder's files are noted."""
    if not path.is_file():  # a pipe or a device would be waited for, or read for ever
        raise ConfigError(
            "data.path",
            printable(str(path)),
            "is no regular file, and text is read more than once",
            "write it to a file and give that",
        )
    where = named("data.path", printable(str(path)))
    try:
        rows = _rows(path, path.name, config)
        if rows is not None:
            return rows
        _look_for_json(path, path.name, config, notices)
        size = TextFile(path).num_bytes()
        return _parts_of_file(path, path.name, _piece_bytes(size, config), size, config.encoding)
    except OSError as error:
        raise ConfigError(
            f"{option_of(config)}: cannot be read ({error.strerror or error}); {_fix_of(error)}, or give another file"
        ) from None
    except NotTextError as error:
        raise ConfigError(f"{where}: {error}{remedy(error)}") from None
    except NoRecordsError as error:
        raise ConfigError(f"{where}: {error}") from None


def _of_folder(
    root: Path, found: Sequence[Path], config: TextConfig, notices: Notices, *, ending: str | None
) -> Iterator[CandidateDocument]:
    """Documents of a folder's files: one of each text; a file that is a large share of the text is cut like a single
    file.

    A file without known records is a text if its ending is in `MAY_BE_TEXT`, unless a pattern asks for this very
    `ending`.
    """
    sizes = {}
    for path in Progress("looked at", total=len(found), unit="files").over(found):
        name = path.as_posix()
        try:
            rows = _rows(root / path, name, config)
            if rows is not None:
                yield from rows
                continue
            _look_for_json(root / path, name, config, notices)
            sizes[path] = TextFile(root / path).num_bytes()
        except OSError as error:
            notices.left_out.add(f"{NOT_READABLE}, {error.strerror or error}", name)
        except NotTextError as error:
            notices.left_out.add(error.reason, name)
        except NoRecordsError as error:
            own = ending_of(name)
            if own is not None and own == ending:
                where = named("data.path", printable(str(root / path)))
                raise ConfigError(f"{where}: {error}") from None
            if own in MAY_BE_TEXT:
                sizes[path] = TextFile(root / path).num_bytes()
                notices.as_text.add(_NO_RECORDS, f"{name}: {error.seen}")
            else:
                notices.left_out.add(_NO_RECORDS, f"{name}: {error.seen}")
    most = _all_bytes(sum(sizes.values()), config) // _LEAST_PIECES
    piece_bytes = _piece_bytes(sum(sizes.values()), config)
    for path, size in sizes.items():
        parts = None
        if size > max(most, _LEAST_PIECE_BYTES):
            try:
                parts = _parts_of_file(root / path, path.as_posix(), piece_bytes, size, config.encoding)
            except (OSError, NotTextError):
                parts = None  # left out when it is read as a whole
        yield from parts or _whole(root, [path], config)


def _fix_of(error: OSError) -> str:
    """Fix of a file that cannot be read: a damaged one has no number of the system's."""
    if error.errno is None:
        return "restore it from a copy"
    return "change its permissions" if isinstance(error, PermissionError) else "check it"


def _look_for_json(path: Path, name: str, config: TextConfig, notices: Notices) -> None:
    """Count a text file that holds JSON though its name does not say so."""
    found = json_in(path, config.encoding)
    if found is not None:
        notices.unnamed.add(_LINES if found == "lines" else ENTRIES, name)


def _all_bytes(num_bytes: int, config: TextConfig) -> int:
    """Bytes of a corpus that will be used, of `num_bytes`."""
    return num_bytes if config.max_bytes is None else min(num_bytes, config.max_bytes)


def _piece_bytes(num_bytes: int, config: TextConfig) -> int:
    share = _all_bytes(num_bytes, config) // _LEAST_PIECES
    return min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, share))


def _parts_of_file(
    path: Path, name: str, piece_bytes: int, num_bytes: int, encoding: str | None
) -> list[CandidateDocument]:
    """A file of `num_bytes` cut at line ends into documents of about `piece_bytes`, so that it can be split."""
    data = TextFile(path).data()
    codec, first_byte = encoding_of(data[:MOST_OF_A_MARK], encoding)
    text = decoded(data, encoding)
    size = max(piece_bytes * len(text) // max(num_bytes, 1), 1)  # in characters
    parts: list[CandidateDocument] = []
    start = 0
    while start < len(text):
        end = start + size
        newline = text.find("\n", end, end + size)
        end = newline + 1 if newline >= 0 else end
        piece = text[start:end]
        last_byte = first_byte + len(piece.encode(codec))
        read: Callable[[], str] = TextFile(path, first_byte, last_byte, codec)
        # Packed files cannot be read from the middle, nor files in a stateful encoding.
        if is_packed(path) or not _is_piece(data[first_byte:last_byte], codec, piece):
            read = partial(str, piece)
        parts.append(CandidateDocument(f"{name}#{len(parts):06d}", read))
        start, first_byte = end, last_byte
    return parts


def _is_piece(data: bytes, codec: str, text: str) -> bool:
    try:
        return decoded(data, codec) == text
    except NotTextError:
        return False


def _dataset(name: str, column: str | None) -> list[CandidateDocument]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            "data.dataset",
            name,
            "needs the package 'datasets'",
            "install it with: pip install datasets",
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # the library raises many kinds, plain Exception among them
        reason = " ".join(str(error).split())[:200]
        raise ConfigError("data.dataset", name, f"cannot be loaded ({reason})", "check the name") from None
    if not len(rows):
        return []
    where = named("data.dataset", name)
    readers = [partial(_row, rows, i) for i in range(len(rows))]
    try:
        records = (read() for read in readers)
        shape = found_shape(records, rows.column_names, column, what="its table")
    except NoRecordsError as error:
        raise ConfigError(f"{where}: {error}") from None
    found = [Row(read, shape, "row", i, where) for i, read in enumerate(readers, 1)]
    return [CandidateDocument(f"{i:012d}", row, shown=row.at(name)) for i, row in enumerate(found)]


def _row(rows: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = without_none(dict(rows[index]))
    return found


def option_of(config: TextConfig) -> str:
    """The option that names the text, for messages."""
    if config.dataset is not None:
        return named("data.dataset", config.dataset)
    paths = (config.path,) if isinstance(config.path, str) else config.path or ("none",)
    return named("data.path", printable(" ".join(paths)))
