"""Wheels come out of the pieces as they went in, and a missing or damaged piece is named."""

import random

import pytest
from tests.support.tools import tool


@pytest.fixture
def wheels():
    return tool("wheels")


def test_pieces_make_the_same_wheels(wheels, tmp_path, capsys):
    source, pieces, target = (tmp_path / name for name in ("source", "pieces", "target"))
    source.mkdir()
    content = {f"p{n}-1-py3-none-any.whl": random.Random(n).randbytes(70_000 * n) for n in (1, 2, 3)}
    for name, data in content.items():
        (source / name).write_bytes(data)
    wheels.main(["split", str(source), str(pieces), "--megabytes", "0.1"])
    assert all(piece.stat().st_size <= 100_000 for piece in pieces.iterdir())
    wheels.main(["join", str(pieces), str(target)])
    assert {wheel.name: wheel.read_bytes() for wheel in target.iterdir()} == content
    first = pieces / "000"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="000 is damaged"):
        wheels.join(pieces, target)
    first.unlink()
    with pytest.raises(SystemExit, match="000 of .* is missing"):
        wheels.join(pieces, target)
