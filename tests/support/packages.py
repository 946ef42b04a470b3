"""Packages with entry points, as pip leaves them in a folder."""

from collections.abc import Mapping
from pathlib import Path


def write_package(folder: Path, name: str, files: Mapping[str, str], points: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package and what `importlib.metadata` reads of it.

    Args:
        folder: a folder of sys.path.
        name: name of the distribution.
        files: texts of its modules by path.
        points: places by name, by group of entry points.
    """
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = []
    for group, places in points.items():
        lines += [f"[{group}]", *(f"{key} = {place}" for key, place in places.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
