"""Text for the end-to-end runs: the Python source of the standard library and of the installed packages."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})


def sources(root: Path) -> Iterator[Path]:
    """Python files below a folder in a fixed order, no links, without installed packages inside it."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED)
        for name in sorted(names):
            path = Path(folder) / name
            if path.suffix == ".py" and not path.is_symlink():
                yield path


def gather(target: Path, *, max_bytes: int) -> Path:
    """Copy the standard library's source and then the packages' to a folder, up to a size; once.

    Args:
        target: the folder; if it is there, it is taken as it is.
        max_bytes: of all files together.

    Returns:
        The folder, to be given as `data.path`.
    """
    if target.exists():
        return target
    beside = target.with_name(target.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    left = max_bytes
    for name, key in (("stdlib", "stdlib"), ("packages", "purelib")):
        root = Path(sysconfig.get_path(key))
        for path in sources(root):
            size = path.stat().st_size
            if size > left:
                break
            left -= size
            copy = beside / name / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    beside.rename(target)
    return target
