"""Files that somebody names to get an answer in: looked at before the work begins, and there when they are complete."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertmesh.config.base import expanded
from expertmesh.errors import ConfigError


def output_file(option: str, name: str | Path, *, read: Iterable[str | Path | None] = ()) -> Path:
    """A place where a file can be written: no file yet, or a regular one, which is replaced.

    Args:
        option: its name, as "output" or "page".
        name: of the file.
        read: files that the same call reads, which must stay as they are.

    Raises:
        ConfigError: it is something else than a file, is read, or lies in no folder that can be written.
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
    """Have an `OSError` of writing name what is written: the system's own names no file, one that is gone, or the source of a copy.

    Args:
        path: what the user knows, a file or a folder.
        partial: what it is until it is complete; None: itself.
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
    """A name to write under inside; what is there becomes the file afterwards, and is gone where something failed."""
    target = path.resolve()  # a link stays one
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    with naming(path, partial):
        try:
            yield partial
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, all of it or nothing.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    with complete(path) as partial:
        partial.write_text(text, encoding="utf-8")
