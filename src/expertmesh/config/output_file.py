"""Output files that a user names: checked before the work begins, and moved into place when they are complete."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expertmesh.config.base import expanded
from expertmesh.errors import ConfigError


def output_file(option: str, name: str | Path, *, read: Iterable[str | Path | None] = ()) -> Path:
    """The path of an output file, checked: no file yet, or a regular one, which is replaced.

    Args:
        option: name of the option, as "output" or "page".
        name: path of the file.
        read: files that the same call reads, which must not be replaced.

    Raises:
        ConfigError: the path is no regular file, is one of `read`, or lies in no folder that can be written.
    """
    path = expanded(name)
    if str(name) in ("", "-") or path.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(option, name, "is no regular file", "name a file that may be replaced")
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise ConfigError(option, name, f"there is no folder {folder}", "make it first")
    for other in read:
        if other is None:
            continue
        if path.exists() and expanded(other).exists() and path.samefile(expanded(other)):
            raise ConfigError(
                option, name, f"is the file {other}, which is read", "name another one"
            )
    if not os.access(folder, os.W_OK):
        raise ConfigError(option, name, f"{folder} cannot be written", "choose another folder")
    return path


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Make an `OSError` of writing name the user's path: the system's own names no file, a partial file, or the source of a copy.

    Args:
        path: the file or folder as the user named it.
        partial: its path until it is complete; None: the same path.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if error.filename2 is None else error.filename2
        ours = named is None or str(named).startswith(str(path if partial is None else partial))
        if error.errno is None or not ours:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """Context with a partial path to write to; renamed to `path` on success, deleted on failure."""
    target = path.resolve()  # a link stays one
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    with naming(path, partial):
        try:
            yield partial
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)


class Growing:
    """A file of texts of which each is on the disk when it is written.

    Attributes:
        rest: where the texts before a failure are; None: there were none, or nothing failed.
        count: texts that are written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size, self.count = file, 0, 0
        self.rest: Path | None = None

    def write(self, text: str) -> None:
        """Add a text.

        Raises:
            OSError: it cannot be written; then none of it is there.
        """
        data, done = text.encode(), 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += done
        self.count += 1


@contextmanager
def growing(path: Path) -> Iterator[Growing]:
    """A file to write texts to inside, one after the other; it is there afterwards, and where something failed what was written until
    then is in `NAME.part`, and what was at its place before is as it was.

    Raises:
        OSError: it cannot be written.
    """
    target = path.resolve()
    rest = target.with_name(f"{target.name}.part")
    with complete(path) as partial, partial.open("wb", buffering=0) as file:
        found = Growing(file)
        try:
            yield found
        except BaseException:
            if found.count:
                partial.rename(rest)
                found.rest = rest
            raise


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, all of it or nothing.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    with complete(path) as partial:
        partial.write_text(text, encoding="utf-8")
