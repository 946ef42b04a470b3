"""Wheels that are too large to carry at once: split into pieces, joined on the other side, each checked.

    python tools/wheels.py split .whl .pieces --megabytes 60     # one archive, in .pieces/000, 001, ... and a list of
    sums python tools/wheels.py join .pieces .whl # where all pieces have come together; says which are missing

Needs Python's standard library only.
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

SUMS = "sums.json"


def split(source: Path, target: Path, piece_bytes: int) -> list[Path]:
    """Write all wheels of a folder as one archive in pieces; gives the pieces."""
    wheels = sorted(source.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {source}")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for wheel in wheels:
            tar.add(wheel, arcname=wheel.name)
    data = archive.getvalue()
    target.mkdir(parents=True, exist_ok=True)
    pieces, sums = [], {}
    for number, start in enumerate(range(0, len(data), piece_bytes)):
        piece = target / f"{number:03d}"
        part = data[start : start + piece_bytes]
        piece.write_bytes(part)
        sums[piece.name] = hashlib.sha256(part).hexdigest()
        pieces.append(piece)
    (target / SUMS).write_text(json.dumps(sums, indent=1) + "\n")
    return pieces


def join(source: Path, target: Path) -> list[str]:
    """Put the wheels together again; gives their names.

    Raises:
        SystemExit: a piece is missing or damaged.
    """
    sums = json.loads((source / SUMS).read_text())
    data = bytearray()
    for name, expected in sums.items():
        piece = source / name
        if not piece.exists():
            raise SystemExit(f"piece {name} of {len(sums)} is missing in {source}; carry it here, too")
        part = piece.read_bytes()
        if hashlib.sha256(part).hexdigest() != expected:
            raise SystemExit(f"piece {name} is damaged; carry it again")
        data += part
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        tar.extractall(target, filter="data")
        return tar.getnames()


def main(arguments: list[str]) -> None:
    """Split or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=("split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--megabytes", type=float, default=60.0)
    given = parser.parse_args(arguments)
    if given.verb == "split":
        for piece in split(given.source, given.target, int(given.megabytes * 1e6)):
            print(f"{piece}: {piece.stat().st_size / 1e6:.1f} MB")
    else:
        print("\n".join(join(given.source, given.target)))


if __name__ == "__main__":
    main(sys.argv[1:])
