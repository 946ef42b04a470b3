"""The manifest of a checkpoint: sizes of its files and a checksum per block, so that ranks share the work of comparing
them."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.config.base import parse_json
from expertmesh.errors import CheckpointError

NAME = "manifest.json"
FORMAT_VERSION = 1
"""Version of a checkpoint's format, in its manifest and in its values."""
BLOCK_BYTES = 1 << 26
"""Bytes of a block of a file; each block has a checksum, which one rank compares."""
_READ_BYTES = 1 << 20


class _Unit(NamedTuple):
    """Unit of comparison by one rank: a block of a file, or a whole file."""

    name: str
    file_bytes: int
    start: int
    num_bytes: int
    sha256: str


def described(path: Path, *, block_bytes: int = BLOCK_BYTES) -> dict[str, Any]:
    """Size of a file with its SHA-256, or, for a file of several blocks, the SHA-256 of each block."""
    size = path.stat().st_size
    starts = range(0, max(size, 1), block_bytes)
    sums = [_sha256(path, start, min(block_bytes, size - start)) for start in starts]
    if len(sums) == 1:
        return {"size": size, "sha256": sums[0]}
    return {"size": size, "block_bytes": block_bytes, "blocks": sums}


def write_manifest(folder: Path, files: Mapping[str, Any], *, version: int = FORMAT_VERSION) -> Path:
    """Write the manifest; returns its path. `folder`: the checkpoint."""
    path = folder / NAME
    path.write_text(json.dumps({"format_version": version, "files": files}, indent=1))
    return path


def find_damage(path: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Compare a checkpoint with its manifest; reads the whole checkpoint, or a share.

    Shares have about equally many bytes: at most 1 / n of all plus a block. A manifest of an old version has whole
    files only, each compared by one rank.

    Args:
        share: (i, n): the i-th of n parts of its blocks.

    Returns:
        Description of the first damage found, or None.
    """
    name = NAME
    try:
        manifest = parse_json((path / name).read_bytes())
        check_version(path, manifest.get("format_version", FORMAT_VERSION))
        files = manifest["files"]
        units = [unit for name in sorted(files) for unit in _units(name, files[name])]
        for unit in _share(units, *share):
            name = unit.name
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != unit.file_bytes:
                return f"{name} has {file.stat().st_size} bytes, not {unit.file_bytes}"
            if _sha256(file, unit.start, unit.num_bytes) != unit.sha256:
                return f"{name} has another checksum"
    except OSError as error:
        if name != NAME:
            return f"{name} cannot be read: {error.strerror or error}"
        return f"{NAME} is missing or unreadable"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} is missing or unreadable"
    return None


def check_version(path: Path, version: object) -> None:
    """Refuse a checkpoint of another format version."""
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format version {version}, this program reads {FORMAT_VERSION}; use the matching version"
        )


def _units(name: str, entry: Mapping[str, Any]) -> Iterator[_Unit]:
    """Units of a file, from its entry in the manifest."""
    size = int(entry["size"])
    if "blocks" not in entry:
        yield _Unit(name, size, 0, size, entry["sha256"])
        return
    length, sums = int(entry["block_bytes"]), entry["blocks"]
    starts = range(0, size, length)
    for start, found in zip(starts, sums, strict=True):
        yield _Unit(name, size, start, min(length, size - start), found)


def _share(units: list[_Unit], position: int, num_parts: int) -> list[_Unit]:
    """The units of a part, of `num_parts` about equal ones: each unit, largest first, goes to the part with fewest
    bytes."""
    sizes = [0] * num_parts
    mine = []
    for unit in sorted(units, key=lambda unit: -unit.num_bytes):
        part = sizes.index(min(sizes))
        sizes[part] += unit.num_bytes
        if part == position:
            mine.append(unit)
    return sorted(mine)


def _sha256(path: Path, start: int, num_bytes: int) -> str:
    """SHA-256 of a part of a file, in hex digits."""
    found, left = hashlib.sha256(), num_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_SEQUENTIAL)
        while data := file.read(min(left, _READ_BYTES) or 1):  # reads an empty file, too, which may be unreadable
            found.update(data)
            left -= len(data)
            if left <= 0:
                break
    return found.hexdigest()
