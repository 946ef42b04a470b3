"""Decoding of bytes to text: one rule, for training texts, parallel text, prompts, standard input and configurations.

Bytes are UTF-8, unless they begin with a mark (BOM) of UTF-16 or UTF-32, or another encoding is named. A mark overrides
the name, since hardly any text begins with its characters, and is removed. Bytes with a NUL character are no text.
"""

import codecs
import re

from expertmesh.errors import named

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16's mark, with which it begins
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
MOST_OF_A_MARK = max(len(mark) for mark, _ in _MARKS)
"""Number of first bytes that `encoding_of` needs."""
BINARY = "files are binary"
"""Reason of `NotTextError` for bytes that are text in no encoding."""
_AS_WRITTEN = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
"""Encodings of texts without a mark, by names that stand for one with a mark: little-endian, as in nearly all files."""
_LOOKED_AT = 1 << 16
_OTHER = "other"
"""Result of `_looks_like` for bytes without control characters in an unrecognised encoding."""
_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Control characters that hardly any text in an 8-bit encoding has."""


class NotTextError(ValueError):
    """Bytes are no text, or values hold none.

    Args:
        said: the message about one file: "is a binary file".
        reason: the message about several files, by which they are counted: "files are binary".
        encoding: an encoding with which the bytes would be text, if it was recognised.
    """

    def __init__(self, said: str, reason: str, encoding: str | None = None) -> None:
        super().__init__(said)
        self.reason, self.encoding = reason, encoding


def encoding_of(start: bytes, encoding: str | None = None) -> tuple[str, int]:
    """(encoding, length of its mark) of bytes."""
    for mark, name in _MARKS:
        if start.startswith(mark):
            return name, len(mark)
    name = codecs.lookup(encoding or "utf-8").name
    return _AS_WRITTEN.get(name, name), 0


def decoded(data: bytes, encoding: str | None = None) -> str:
    """The text of bytes, without its mark."""
    name, skipped = encoding_of(data, encoding)
    try:
        text = data[skipped:].decode(name)
    except UnicodeError:
        raise _not_text(data, name) from None
    if "\0" in text:
        raise _not_text(data, name)
    return text


def remedy(error: NotTextError, option: str = "data.encoding") -> str:
    """The fix for a file that is no text, as the end of a message."""
    if error.reason == BINARY:
        return "; give text"
    name = error.encoding or "NAME"
    convert = f"convert it to UTF-8, for example with iconv -f {name} -t UTF-8"
    return f"; name its encoding, {named(option, name)}, or {convert}" if option else f"; {convert}"


def _not_text(data: bytes, name: str) -> NotTextError:
    """The error for bytes that are no text in an encoding, with a guess of their real one."""
    shown = name.upper() if name.startswith("utf-") else name
    looks = _looks_like(data[:_LOOKED_AT])
    if looks == _OTHER and name == "utf-8":
        return NotTextError("is not UTF-8 text, but of another encoding", "files are not UTF-8 text")
    if looks in (None, _OTHER, name):
        return NotTextError(f"is a binary file, and no {shown} text", BINARY)
    return NotTextError(
        f"is not {shown} text, but perhaps {looks}",
        f"files are not {shown} text, but perhaps {looks}",
        looks,
    )


def _looks_like(data: bytes) -> str | None:
    """A likely encoding of bytes without a mark; None: the bytes are binary."""
    for place, name in ((0, "utf-16-be"), (1, "utf-16-le")):
        letters = data[1 - place :: 2]
        is_latin = data[place::2].count(0) > max(len(letters) // 2, 1)
        if is_latin and not _CONTROLS.search(letters):
            return name
    if _CONTROLS.search(data):
        return None
    if not re.search(rb"[\x80-\x9f]", data):
        return "latin-1"
    try:
        data.decode("cp1252")
    except UnicodeError:  # cp1252 lacks five bytes, which East Asian encodings often have
        return _OTHER
    return "cp1252"
