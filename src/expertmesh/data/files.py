"""Files that hold text: which are found below a folder, why others are left out, and how each is read.

A file is read as bytes, unpacked by the ending of its name (`UNPACKERS`). Names need not be UTF-8; Python's escapes stand
for their bytes.
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
    """Blocks of bytes as a file."""

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
    """What a file holds that zstandard packed, whose own reader takes one that is cut off for a whole one.

    Args:
        file: the packed one.
        what: it is, for the message where the package is missing.

    Raises:
        ConfigError: it is missing. Reading raises EOFError where the file is damaged.
    """
    if importlib.util.find_spec("zstandard") is None:
        raise ConfigError(
            f"{what}: needs the package 'zstandard'; install it with: pip install zstandard"
        )
    import zstandard

    def blocks() -> Iterator[bytes]:
        frame = zstandard.ZstdDecompressor().decompressobj()
        with file:
            try:
                while block := file.read(_BLOCK):
                    while block:
                        if frame.eof:
                            frame = zstandard.ZstdDecompressor().decompressobj()
                        yield frame.decompress(block)
                        block = frame.unused_data
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
        if not frame.eof:
            raise EOFError("it is cut off")

    return cast("BinaryIO", io.BufferedReader(_ByteBlocks(blocks())))


UNPACKERS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast("BinaryIO", gzip.GzipFile(path)),
    ".zst": lambda path: unpacked_zst(path.open("rb"), what=named("data.path", path)),
}
"""Opens a file of each ending as the bytes that are packed in it."""


_log = logging.getLogger("expertmesh.data")


@dataclass
class LeftOut:
    """Files, lines, ... that are not used, by the reason, which is in the plural. Each is told of at level DEBUG.

    Attributes:
        counts: how many for each reason.
        examples: the first name for each reason.
        what: happens to them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    what: str = "left out"

    def add(self, reason: str, name: str) -> None:
        """One more."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, name)
        _log.debug("%s, as %s: %s", self.what, reason, printable(name))

    def add_all(self, others: "LeftOut") -> None:
        """Those of another place, too."""
        self.counts += others.counts
        self.examples = {**others.examples, **self.examples}

    @property
    def total(self) -> int:
        """How many there are in all."""
        return self.counts.total()

    def __str__(self) -> str:
        """All reasons in one line, last the one that hardly anybody asks after."""
        return "; ".join(
            f"{count} {reason} (for example {printable(self.examples[reason])})"
            for reason, count in sorted(self.counts.items(), key=lambda one: one[0] == BINARY)
        )


NOT_READABLE = "files cannot be read"
NOT_A_FILE = "names are no regular files"


@dataclass(frozen=True)
class TextFile:
    """One file of text.

    Attributes:
        path: where it is.
        start: first byte of the part that is meant, after unpacking.
        stop: end of the part; None: of the file.
        encoding: of the text where no mark says it; None: UTF-8.
    """

    path: Path
    start: int = 0
    stop: int | None = None
    encoding: str | None = None

    def __call__(self) -> str:
        """The text.

        Raises:
            NotTextError: it is none.
            OSError: it cannot be read, or what is packed in it is damaged.
        """
        return decoded(self.data(), self.encoding)

    def data(self) -> bytes:
        """The bytes.

        Raises:
            OSError: they cannot be read, or what is packed in the file is damaged.
        """
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
    """A file as its unpacked bytes.

    Raises:
        OSError: it cannot be read, or what is packed in it is damaged.
    """
    try:
        with UNPACKERS.get(path.suffix.lower(), lambda p: p.open("rb"))(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(None, f"damaged: {error}") from None


def is_packed(path: Path) -> bool:
    """Whether the bytes of a file are not those of its text."""
    return path.suffix.lower() in UNPACKERS


def find_files(root: Path, *, follow_links: bool = True) -> tuple[list[Path], LeftOut]:
    """Regular files below a folder, relative to it; no installed packages, no caches.

    Args:
        root: the folder.
        follow_links: whether symbolic links count as what they point at; a folder is entered once in each line of descent.

    Returns:
        The files, and what was left out because it is a pipe, a device, a link to nothing or a folder that cannot be opened.
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


def _folders(
    root: Path, left_out: LeftOut, *, follow_links: bool
) -> Iterator[tuple[Path, list[str]]]:
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
    """A name with its bytes that are not UTF-8 as `\\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends, which are \\n or \\r\\n and nothing else that Python takes for one."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
