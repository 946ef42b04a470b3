"""Output files that a user names: checked before the work begins, and moved into place when they are complete."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

from expertmesh.config.base import expanded
from expertmesh.errors import ConfigError


def output_file(option: str, name: str | Path, *, read: Iterable[str | Path | None] = ()) -> Path:
    """The path of an output file, checked: no file yet, or a regular one, which is replaced.

    Args:
        option: name of the option, as "output" or "page".
        read: files that the same call reads, which must not be replaced.
    """
    path = expanded(name)
    if str(name) == "-" or path.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(option, name, "is no regular file", "name a file that may be replaced")
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise ConfigError(option, name, f"there is no folder {folder}", "make it first")
    for other in read:
        if other is None:
            continue
        if path.exists() and expanded(other).exists() and path.samefile(expanded(other)):
            raise ConfigError(option, name, f"is the file {other}, which is read", "name another one")
    try:
        check_folder(folder)
    except OSError as error:
        raise ConfigError(
            option, name, f"{folder} cannot be written: {error.strerror}", "choose another folder"
        ) from None
    return path


def new_folder(option: str, name: str | Path) -> Path:
    """The path of a folder that work will make, checked: nothing is there, and it can be made."""
    path = expanded(name)
    if os.path.lexists(path):
        raise ConfigError(option, name, "exists already", "choose another folder")
    above = _nearest(path)
    if not above.is_dir():
        raise ConfigError(option, name, f"is below the file {above}", "choose another folder")
    try:
        check_folder(path)
    except OSError as error:
        raise ConfigError(option, name, f"cannot be made: {error.strerror}", "choose another folder") from None
    return path


def check_folder(path: Path) -> None:
    """Try a folder that work will write to: make a file in it, or in the nearest folder above that is there, and delete
    it."""
    place = _nearest(path)
    with naming(path, place):
        handle, probe = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=place)
        os.close(handle)
        Path(probe).unlink()


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))


def check_file(path: Path) -> None:
    """Try a file that work will write or add to, without a change of it."""
    if os.path.lexists(path):
        with naming(path):
            if path.is_dir() or not os.access(path, os.W_OK):
                raise OSError(
                    errno.EISDIR if path.is_dir() else errno.EACCES,
                    "is a folder" if path.is_dir() else "cannot be written",
                    str(path),
                )
    check_folder(path.parent)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Make an `OSError` of writing name the user's path: the system's own names no file, a partial file, or the source
    of a copy."""
    try:
        yield
    except OSError as error:
        ours = str(path if partial is None else partial)
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if error.errno is None or (names and not any(name.startswith(ours) for name in names)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _partial(target: Path) -> Path:
    """Path of a file until it is complete."""
    return target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """Context with a partial path to write to; renamed to `path` on success, deleted on failure."""
    target = path.resolve()  # a link stays one
    partial = _partial(target)
    with naming(path, partial):
        try:
            yield partial
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """Context with a partial folder to fill; renamed to `path` on success, deleted on failure.

    Partial folders that killed processes have left of the same path are deleted first. Missing parent folders are made.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    remove_leftovers(path)
    with naming(path, partial):
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Delete partial files and folders, `.NAME.partial-PID`, of processes that are dead."""
    form = re.compile(
        rf"\.(?:{re.escape(path.name)}\.partial-(\d+)|{re.escape(path.stem)}\.partial-(\d+){re.escape(path.suffix)})"
    )
    others: list[Path] = []
    with suppress(OSError):  # there is no such folder yet, or it cannot be listed
        others += path.parent.iterdir()
    for other in others:
        found = form.fullmatch(other.name)
        if found is None or _is_another(int(found[1] or found[2])):
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.rmtree(other, ignore_errors=True)
        else:
            with suppress(OSError):
                other.unlink()


def _is_another(pid: int) -> bool:
    """Whether a number is a living process, but not this one, whose number a dead one of a container may have had."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process is another user's
        pass
    return True


class Growing:
    """A file of texts, each handed to the system when it is written (no fsync), in a partial file until the end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._size, self.count = file, path, 0, 0
        self.rest: Path | None = None  # where the texts before a failure are; None: there were none, or nothing failed

    def write(self, text: str) -> None:
        """Add a text."""
        data, done = text.encode(), 0
        try:
            with naming(self._path):
                while done < len(data):
                    done += self._file.write(data[done:])
            self._size += done
            self.count += 1
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                self._file.truncate(self._size)
            raise


@contextmanager
def growing(path: Path) -> Iterator[Growing]:
    """A file to write texts to inside, one after the other.

    Afterwards the file is complete at its path. After a failure, also of the last rename, what was at the
    path is unchanged, and the texts written until then are in `NAME.part`, or in `NAME.part2` and so on where something
    has that name; where no such file can be made, they stay in the partial file. `Growing.rest` says where.
    """
    target = path.resolve()  # a link stays one
    partial = _partial(target)
    with naming(path, partial):
        file = partial.open("wb", buffering=0)
    found = Growing(file, path)
    try:
        yield found
        with naming(path, partial):
            file.close()
            partial.rename(target)
    except BaseException:
        with suppress(OSError):
            file.close()
        if found.count:
            found.rest = _set_aside(partial, target)
        else:
            with suppress(OSError):
                partial.unlink()
        raise


def _set_aside(partial: Path, target: Path) -> Path:
    """Rename a partial file to a name beside the target that is free.

    Returns:
        Where the file is: under the partial name still if it cannot be renamed.
    """
    try:
        names = (target.with_name(f"{target.name}.part{end}") for end in chain([""], count(2)))
        return partial.rename(next(name for name in names if not os.path.lexists(name)))
    except OSError:
        return partial


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, all of it or nothing."""
    with complete(path) as partial:
        partial.write_text(text, encoding="utf-8")
