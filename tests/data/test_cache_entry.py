"""Entries of a cache: filled once, made anew where they are damaged, without what killed processes leave."""

import logging
import threading
import time

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.config.file_lock import exclusive
from expertmesh.data.cache_entry import INDEX, fill_once

NAME = "parallel-0123456789abcdef01234567"


@pytest.fixture
def entry(tmp_path):
    """A function that asks for the entry; its list has a number for each filling."""
    filled = []

    def fill(folder):
        filled.append(len(filled))
        (folder / INDEX).write_text("[]")
        (folder / "tokens.npy").write_bytes(bytes(range(99)))

    def ask():
        fill_once(tmp_path / "cache" / NAME, fill)
        return tmp_path / "cache" / NAME

    ask.filled = filled
    return ask


def flip(file):
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(bytes(data))


DAMAGES = {
    "a wrong bit": lambda f: flip(f / "tokens.npy"),
    "cut off": lambda f: (f / "tokens.npy").write_bytes(b"\0" * 9),
    "a file is gone": lambda f: (f / "tokens.npy").unlink(),
    "a folder for a file": lambda f: ((f / "tokens.npy").unlink(), (f / "tokens.npy").mkdir()),
    "another index": lambda f: (f / INDEX).write_text("{}"),
    "no index": lambda f: (f / INDEX).unlink(),
    "no checksums in their file": lambda f: (f / "checksums.json").write_text("[]"),
    "checksums nested without end": lambda f: (f / "checksums.json").write_text("[" * 50_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew_and_said(entry, damage, caplog):
    folder = entry()
    entry()
    assert entry.filled == [0]
    DAMAGES[damage](folder)
    with caplog.at_level(logging.WARNING):
        entry()
    assert entry.filled == [0, 1] and "it is made anew" in caplog.text
    assert (folder / "tokens.npy").read_bytes() == bytes(range(99))
    entry()
    assert entry.filled == [0, 1]


def test_what_cannot_be_filled_leaves_nothing_but_its_lock(tmp_path):
    def fill(folder):
        (folder / INDEX).write_text("[]")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fill_once(tmp_path / NAME, fill)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.lock"]


def test_a_wait_for_another_process_is_said_once(entry, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    thread = threading.Thread(target=entry)
    with caplog.at_level(logging.INFO), exclusive(tmp_path / "cache" / f"{NAME}.lock"):
        thread.start()
        end = time.monotonic() + PATIENCE_S
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
        assert entry.filled == []
    thread.join()
    said = [text for text in caplog.messages if "another process" in text]
    folder = tmp_path / "cache" / NAME
    assert said == [f"another process prepares these data in {folder}; waiting for it"]
    assert entry.filled == [0]


def test_an_entry_of_old_has_no_checksums(entry):
    folder = entry()
    (folder / "checksums.json").unlink()
    flip(folder / "tokens.npy")
    entry()
    assert entry.filled == [0]


def test_what_killed_processes_left_is_removed_and_what_others_make_is_not(entry, tmp_path):
    base = tmp_path / "cache"
    mine, dead = base / f"{NAME}.partial-999999", base / f"tokens-{'0' * 24}.partial-999998"
    alive, users = base / f"{'f' * 32}.partial-999997", base / "notes.partial-1"
    for folder in (mine, dead, alive, users):
        folder.mkdir(parents=True)
    with exclusive(base / f"{'f' * 32}.lock"):
        entry()
    assert [f.exists() for f in (mine, dead, alive, users)] == [False, False, True, True]
