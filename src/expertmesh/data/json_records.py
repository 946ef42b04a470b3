"""JSON files of records: objects on lines, in an array, or a single object, as the content shows."""

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from expertmesh.config.base import parse_json
from expertmesh.data.data_progress import Progress
from expertmesh.data.encoding import MOST_OF_A_MARK, NotTextError, decoded, encoding_of
from expertmesh.data.files import TextFile, is_packed, lines_of, opened, printable
from expertmesh.data.records import NoRecordsError, Row, found_shape
from expertmesh.errors import named

JSON = (".jsonl", ".ndjson", ".json")
"""Endings of JSON files."""
_HEAD_BYTES = 4096
_FIRST_BYTES = 1 << 20
_BLANKS = re.compile(r"[ \t\n\r]*")


class _Part(NamedTuple):
    """A record: its number from 1, and a function that returns its bytes in UTF-8."""

    number: int
    read: Callable[[], bytes]


def json_rows(path: Path, *, encoding: str | None, column: str | None, is_lines: bool) -> list[Row]:
    """The records of a JSON file, each read when it is called.

    Args:
        is_lines: whether the name stands for an object on each line; else a single object may span lines.
    """
    parts, unit = _parts(path, encoding, is_lines=is_lines)
    strange: list[NotTextError] = []

    def values() -> Iterator[Any]:
        for part in parts:
            try:
                yield _parsed(part.read)
            except NotTextError as error:
                strange.append(error)
            except ValueError:
                yield None

    try:
        what = "its first object" if unit == "line" else "its first entry"
        shape = found_shape(values(), (), column, what=what) if parts else None
    except NoRecordsError:
        if len(strange) == len(parts):
            raise strange[0] from None
        raise
    where = named("data.path", printable(str(path)))
    return [Row(partial(_parsed, p.read), shape, unit, p.number, where) for p in parts]


def _parsed(read: Callable[[], bytes]) -> Any:
    text = decoded(read())
    try:
        return parse_json(text)
    except ValueError:
        raise ValueError("is not JSON") from None


def _parts(path: Path, encoding: str | None, *, is_lines: bool) -> tuple[list[_Part], str]:
    """(records, unit) of a file; the unit is "line" or "entry"."""
    with opened(path) as file:
        name, skipped = encoding_of(file.read(MOST_OF_A_MARK), encoding)
    with closing(_lines(path, name, skipped)) as lines:
        first, second = next(lines, None), next(lines, None)
    start = b"" if first is None else first.read().lstrip()
    if start.startswith(b"["):
        try:
            return _entries(path, name, skipped), "entry"
        except ValueError as error:
            if not is_lines or isinstance(error, NotTextError):
                raise
    elif start and not is_lines and (second is None or not _is_object(start)):
        text = decoded(TextFile(path).data(), name)
        _check_json(text)
        return [_Part(1, partial(bytes, text.encode()))], "entry"
    return list(_lines(path, name, skipped)), "line"


def entries_of(text: str, *, is_lines: bool) -> tuple[list[tuple[int, str]], str]:
    """(numbered JSON values, unit) of a text: objects on lines, the entries of an array, or a single object."""
    lines = [(number, line) for number, line in enumerate(lines_of(text), 1) if line.strip()]
    if text.lstrip().startswith("["):
        try:
            spans = enumerate(_spans(text), 1)
            return [(number, text[start:stop]) for number, (start, stop) in spans], "entry"
        except NoRecordsError:
            if not is_lines:
                raise
    elif lines and not is_lines and (len(lines) == 1 or not _is_object(lines[0][1])):
        _check_json(text)
        return [(1, text)], "entry"
    return lines, "line"


def _is_object(line: bytes | str) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def json_in(path: Path, encoding: str | None) -> Literal["lines", "entries"] | None:
    """Form in which a text file, whatever its name, holds JSON objects; None: it holds none.

    "lines": its first lines are objects. "entries": it begins with an array of objects, or with an object over several
    lines before others or none; looked for only under a name that says nothing, without an ending or with .txt, since
    programs keep such files under many others.

    Args:
        encoding: encoding of a file without a mark; None: UTF-8.
    """
    with opened(path) as file:
        head = file.read(_HEAD_BYTES)
        name, skipped = encoding_of(head[:MOST_OF_A_MARK], encoding)
        if not head[skipped:].decode(name, errors="replace").lstrip().startswith(("[", "{")):
            return None
        head += file.read(_FIRST_BYTES)
    text = head[skipped:].decode(name, errors="replace").lstrip()
    if text.startswith("{"):
        with closing(_lines(path, name, skipped)) as lines:
            first = [line for line in (next(lines, None), next(lines, None)) if line is not None]
        if first and all(_is_object(line.read()) for line in first):
            return "lines"
    own = path.with_suffix("") if is_packed(path) else path
    return "entries" if own.suffix.lower() in ("", ".txt") and _begins_an_entry(text) else None


def _begins_an_entry(text: str) -> bool:
    """Whether a text begins with an array of JSON objects, or with an object before others or none."""
    is_array = text.startswith("[")
    try:
        value, end = json.JSONDecoder().raw_decode(text, _after_blanks(text, int(is_array)))
    except (ValueError, RecursionError):
        return False
    end = _after_blanks(text, end)
    following = (",", "]", "") if is_array else ("{", "")
    return isinstance(value, dict) and text[end : end + 1] in following


def _lines(path: Path, name: str, skipped: int) -> Generator[_Part]:
    """The lines that are not blank; held in memory if the file is packed or not UTF-8."""
    is_stored = not is_packed(path) and name == "utf-8"
    with opened(path) as file:
        start, lines = len(file.read(skipped)), cast("Iterable[bytes]", file)
        if name != "utf-8":
            lines = (f"{line}\n".encode() for line in decoded(file.read(), name).split("\n"))
        for number, line in enumerate(Progress("looked through").over(lines, len), 1):
            if line.strip():
                stored = partial(_slice, path, start, len(line))
                yield _Part(number, stored if is_stored else partial(bytes, line))
            start += len(line)


def _slice(path: Path, start: int, length: int) -> bytes:
    """Bytes of a file that is not packed."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _entries(path: Path, name: str, skipped: int) -> list[_Part]:
    """The entries of the array in a file; raises NoRecordsError if the file is no JSON."""
    text = decoded(TextFile(path).data(), name)
    is_stored = not is_packed(path) and name == "utf-8"
    parts: list[_Part] = []
    first_byte, before = skipped, 0
    for start, stop in Progress("looked through", unit="entries").over(_spans(text)):
        first_byte += len(text[before:start].encode())
        entry = text[start:stop].encode()
        stored = partial(_slice, path, first_byte, len(entry))
        parts.append(_Part(len(parts) + 1, stored if is_stored else partial(bytes, entry)))
        first_byte, before = first_byte + len(entry), stop
    return parts


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of each entry in the text of an array."""
    decoder = json.JSONDecoder()
    at = _after_blanks(text, text.index("[") + 1)
    is_first = True
    while text[at : at + 1] != "]" or not is_first:
        try:
            _, stop = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _no_json(text, error.pos) from None
        except RecursionError:
            raise NoRecordsError("is nested too deep", "; correct it") from None
        yield at, stop
        is_first = False
        at = _after_blanks(text, stop)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise _no_json(text, at)
        at = _after_blanks(text, at + 1)
    if (end := _after_blanks(text, at + 1)) < len(text):
        raise _no_json(text, end)


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise _no_json(text, error.pos) from None
    except RecursionError:
        raise NoRecordsError("is nested too deep", "; correct it") from None


def _no_json(text: str, at: int) -> NoRecordsError:
    line = text.count("\n", 0, at) + 1
    return NoRecordsError(f"is no JSON (line {line})", "; correct it, or write one object on each line")
