"""The map has every room as the imports draw it, and the files that it names."""

import re

import pytest
from tests.support.pages import ROOT
from tests.support.tools import tool

MOST_ROOMS = 12
OFF_BY = 1500
"""Lines that a room may gain or lose before its size is drawn anew."""


@pytest.fixture(scope="module")
def rooms():
    return tool("rooms")


def test_rooms_on_the_page_are_those_of_the_imports(rooms):
    """`python tools/rooms.py` draws them anew. A room whose parts are not all here is not compared."""
    page = rooms.PAGE.read_text()
    rows, sizes = rooms.drawn()
    assert 0 < len(rows) <= MOST_ROOMS
    found = re.findall(r"^\| \*\*.*$", page, re.MULTILINE)
    for room, row, there in zip(rooms.ROOMS, rows, found, strict=True):
        if all(path.exists() for part in room.parts for path in rooms.paths_of(part)):
            size = re.search(r"\| ([\d,]+) \| [^|]*\|$", there).group(1)
            assert row.format(size=size) == there
            assert abs(sizes[room.name] - int(size.replace(",", ""))) <= OFF_BY, room.name


def test_a_part_without_a_room_is_an_error(rooms, tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text("")
    rooms.SOURCE = tmp_path
    try:
        with pytest.raises(SystemExit, match=r"without a room: \['planted'\]"):
            rooms.drawn()
    finally:
        rooms.SOURCE = ROOT / "src" / "expertmesh"


@pytest.mark.parametrize(
    "thing",
    [
        "router",
        "all-to-all",
        "GEMM",
        "LoRA",
        "family",
        "ZeRO",
        "opening",
        "sampling",
        "tool calls",
        "option",
        "checkpoints",
        "planner",
        "C source",
        "top-k",
        "DPO",
        "int4",
        "capacity",
        "optimizer",
        "scheduler",
        "endpoint",
    ],
)
def test_the_map_answers_where_a_thing_is(rooms, thing):
    answers = [line for line in rooms.PAGE.read_text().splitlines() if line.startswith("| ")]
    (answer,) = [line for line in answers if thing in line.split("|")[1] and "**" not in line.split("|")[1]]
    names = [room.name for room in rooms.ROOMS]
    assert answer.split("|")[2].strip() in names
    files = re.findall(r"`([\w/]+(?:\.\w+|/))`", answer.split("|")[3])
    assert files and all((rooms.SOURCE / name).exists() for name in files)
