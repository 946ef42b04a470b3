"""Text files: found below a folder, counted where they are left out, and read, also from packed files.

A file is read as bytes, unpacked by the ending of its name (`UNPACKERS`). Names that are not UTF-8 have Python's
escapes for their bytes.
"""

import gzip
import importlib.util
import io
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from expertmesh.data.data_progress import Progress
from expertmesh.data.encoding import BINARY, decoded
from expertmesh.errors import ConfigError, named

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_BLOCK = 1 << 20


class _ByteBlocks(io.RawIOBase):
    """A readable file over an iterator of blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__()
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._left = self._left or memoryview(next(filter(None, self._blocks), b""))
        part, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        memoryview(buffer)[: len(part)] = part
        return len(part)


def unpacked_zst(file: BinaryIO, *, what: str) -> BinaryIO:
    """A reader of a zstandard file that notices when the file is cut off, unlike zstandard's own."""
    if importlib.util.find_spec("zstandard") is None:
        raise ConfigError(f"{what}: needs the package 'zstandard'; install it with: pip install zstandard")
    import zstandard

    def blocks() -> Iterator[bytes]:
        frame, has_begun = zstandard.ZstdDecompressor().decompressobj(), False
        with file:
            try:
                while block := file.read(_BLOCK):
                    has_begun = True  # an empty file is an empty text, as of every kind
                    while block:
                        if frame.eof:
                            frame = zstandard.ZstdDecompressor().decompressobj()
                        yield frame.decompress(block)
                        block = frame.unused_data
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
        if has_begun and not frame.eof:
            raise EOFError("it is cut off")

    return cast("BinaryIO", io.BufferedReader(_ByteBlocks(blocks())))


UNPACKERS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast("BinaryIO", gzip.GzipFile(path)),
    ".zst": lambda path: unpacked_zst(path.open("rb"), what=named("data.path", path)),
}
"""Functions that open packed files as unpacked bytes, by ending."""


_log = logging.getLogger("expertmesh.data")


@dataclass
class LeftOut:
    """Counts of files, lines, ... that are not used, by reason. Each is logged at level DEBUG."""

    counts: Counter[str] = field(default_factory=Counter)  # number for each reason, which is worded in the plural
    examples: dict[str, str] = field(default_factory=dict)  # the first name for each reason
    what: str = "left out"  # their treatment, in words

    def add(self, reason: str, name: str) -> None:
        """Count and log a file."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, name)
        _log.debug("%s, as %s: %s", self.what, reason, printable(name))

    def add_all(self, others: "LeftOut") -> None:
        """Add the counts of another folder."""
        self.counts += others.counts
        self.examples = {**others.examples, **self.examples}

    @property
    def total(self) -> int:
        """Number of files, lines, ... in all."""
        return self.counts.total()

    def __str__(self) -> str:
        """All reasons in one line, binary files last."""
        return "; ".join(
            f"{count} {reason} (for example {printable(self.examples[reason])})"
            for reason, count in sorted(self.counts.items(), key=lambda one: one[0] == BINARY)
        )


NOT_READABLE = "files cannot be read"
NOT_A_FILE = "names are no regular files"


@dataclass(frozen=True)
class TextFile:
    """A text file, or a part of one; calling it returns the text."""

    path: Path
    start: int = 0  # first byte of the part, after unpacking
    stop: int | None = None  # end of the part; None: end of the file
    encoding: str | None = None  # encoding of a text without a mark; None: UTF-8

    def __call__(self) -> str:
        """The text."""
        return decoded(self.data(), self.encoding)

    def data(self) -> bytes:
        """The bytes, unpacked."""
        with opened(self.path) as file:
            if self.start:
                file.seek(self.start)
            return file.read(-1 if self.stop is None else self.stop - self.start)

    def num_bytes(self) -> int:
        """Bytes of the whole file, unpacked."""
        if not is_packed(self.path):
            return self.path.stat().st_size
        with opened(self.path) as file:
            sizes = iter(lambda: len(file.read(_BLOCK)), 0)
            return sum(Progress("unpacked").over(sizes, lambda size: size))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Context with a file of unpacked bytes."""
    try:
        with UNPACKERS.get(path.suffix.lower(), lambda p: p.open("rb"))(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(None, f"damaged: {error}") from None


def is_packed(path: Path) -> bool:
    """Whether a file is packed, by its ending."""
    return path.suffix.lower() in UNPACKERS


def find_files(root: Path, *, follow_links: bool = True) -> tuple[list[Path], LeftOut]:
    """Regular files below a folder, relative to it; no installed packages, no caches.

    Args:
        follow_links: whether symbolic links are followed; a link to a folder above it never is.

    Returns:
        The files, and counts of left out pipes, devices, links to nothing and folders that cannot be opened.
    """
    found: list[Path] = []
    left_out = LeftOut()
    progress = Progress("found", unit="files")
    for folder, names in _folders(root, left_out, follow_links=follow_links):
        progress.at(len(found))
        for name in names:
            path = folder / name
            relative = path.relative_to(root)
            if path.is_symlink() and not follow_links:
                continue
            if path.is_file():
                found.append(relative)
            else:
                left_out.add(NOT_A_FILE, relative.as_posix())
    progress.finish()
    return found, left_out


def _folders(root: Path, left_out: LeftOut, *, follow_links: bool) -> Iterator[tuple[Path, list[str]]]:
    def complain(error: OSError) -> None:
        left_out.add(NOT_READABLE, str(error.filename))

    ancestors = {root: frozenset({_identity(root)})}
    for folder, subfolders, names in os.walk(root, onerror=complain, followlinks=follow_links):
        above = ancestors.pop(Path(folder))
        kept = []
        for name in subfolders:
            path = Path(folder) / name
            if name in _SKIPPED_FOLDERS or (path.is_symlink() and not follow_links):
                continue
            identity = _identity(path)
            if identity not in above:
                kept.append(name)
                ancestors[path] = above | {identity}
        subfolders[:] = kept
        yield Path(folder), names


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def printable(name: str) -> str:
    """A name whose bytes that are not UTF-8 are escaped as `\\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends; only \\n and \\r\\n end a line, unlike in `str.splitlines`."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
