"""Cache folders, computed once by one of several processes, and again if they are damaged."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from expertmesh.config.base import parse_json
from expertmesh.config.file_lock import exclusive
from expertmesh.config.output_file import naming
from expertmesh.data.data_progress import Progress
from expertmesh.errors import ConfigError

INDEX = "index.json"
"""File that marks an entry as complete."""
_CHECKSUMS = "checksums.json"
_BLOCK = 1 << 22
_PARTIAL = re.compile(r"((?:[a-z]+-)?[0-9a-f]{16,})\.partial-\d+")

_log = logging.getLogger("expertmesh.data")


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder unless it is complete. Several processes may call at once: one fills it, the others wait.

    The folder appears by one rename, so a killed process leaves no partial entry. Checksums are compared in each call,
    and a damaged entry is computed again.
    """
    if _damage(folder) is None:
        return
    _make_cache(folder.parent)
    with naming(folder), _alone(folder):
        damage = _damage(folder)
        if damage is None:
            return
        if folder.exists():
            _log.warning("cache %s: %s; it is made anew", folder, damage)
        _remove_leftovers(folder.parent, mine=folder.name)
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            fill(partial)
            checksums = {path.name: _checksum(path) for path in sorted(partial.iterdir())}
            (partial / _CHECKSUMS).write_text(json.dumps(checksums, indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context with the lock of an entry; before it waits for another process it says so once."""
    lock = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(lock, wait=False))
        except BlockingIOError:
            _log.info("another process prepares these data in %s; waiting for it", folder)
            stack.enter_context(exclusive(lock))
        yield


def _damage(folder: Path) -> str | None:
    """Description of an entry's damage, or None; reads the whole entry. Entries of old versions have no checksums."""
    if not (folder / INDEX).exists():
        return f"{INDEX} is missing"
    if not (folder / _CHECKSUMS).exists():
        return None
    try:
        for name, checksum in parse_json((folder / _CHECKSUMS).read_bytes()).items():
            if _checksum(folder / name) != checksum:
                return f"{name} has another checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{_CHECKSUMS} is unreadable"
    return None


def _checksum(path: Path) -> str:
    """SHA-256 of a file, in hex digits; logs progress."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        progress = Progress("checked", total=path.stat().st_size, unit="MB of tokens")
        for block in progress.over(iter(lambda: file.read(_BLOCK), b""), len):
            digest.update(block)
    return digest.hexdigest()


def _make_cache(path: Path) -> None:
    """Make the folder of a cache."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError("data.cache_dir", path, "is a file or below a file", "choose a folder") from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            raise
        raise ConfigError(
            "data.cache_dir",
            path,
            f"cannot be made ({error.strerror})",
            "choose a folder that you may write",
        ) from None


def _remove_leftovers(base: Path, *, mine: str) -> None:
    """Delete partial entries of killed processes; a living process holds the lock of its entry."""
    for path in base.iterdir():
        found = _PARTIAL.fullmatch(path.name)
        if found is None:
            continue
        with suppress(BlockingIOError), ExitStack() as stack:
            if found[1] != mine:
                stack.enter_context(exclusive(base / f"{found[1]}.lock", wait=False))
            shutil.rmtree(path, ignore_errors=True)
