"""Damaged and empty files of every kind: alone refused with the reason, in a folder left out with a note; an empty one
is an empty text."""

import gzip
import io
import logging

import pytest
import zstandard

from expertmesh.errors import ConfigError
from expertmesh.models.registry import find_family

TEXT = "some words of text, and more of them\n" * 200
LINES = b'{"text": "some words of text, and more of them"}\n' * 200


def table():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [TEXT]}), file)
    return file.getvalue()


FILES = {
    "a.txt": TEXT.encode,
    "a.jsonl": lambda: LINES,
    "a.txt.gz": lambda: gzip.compress(TEXT.encode()),
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.txt.zst": lambda: zstandard.compress(TEXT.encode()),
    "a.jsonl.zst": lambda: zstandard.compress(LINES),
    "a.parquet": table,
    "a.parquet.gz": lambda: gzip.compress(table()),
    "a.parquet.zst": lambda: zstandard.compress(table()),
}
DAMAGES = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "cut in its head": lambda whole: whole[:3],
    "cut in its end": lambda whole: whole[:-3],
    "another file": lambda whole: b"\0\1another" * 40,
}
CASES = [(name, how) for name in FILES for how in DAMAGES if how == "empty" or name not in ("a.txt", "a.jsonl")]


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "in a folder"])
def test_one_rule_for_files_of_every_kind(tiny, tmp_path, caplog, name, how, is_alone):
    place = tmp_path / "texts"
    place.mkdir()
    (place / name).write_bytes(DAMAGES[how](FILES[name]()))
    if not is_alone:
        for i in range(30):
            (place / f"good{i}.txt").write_text(f"{i} {TEXT}")
    changes = {"data.path": str(place / name if is_alone else place)}
    task = find_family("gpt").open_task(tiny(**changes, **{"data.cache_dir": str(tmp_path / "cache")}))
    if is_alone:
        words = (
            "has no text .it is empty.; give text"
            if how == "empty"
            else "cannot be read .damaged: .*; restore it from a copy"
        )
        with pytest.raises(ConfigError, match=f"{name}: {words}"):
            task.prepare()
        return
    with caplog.at_level(logging.WARNING, logger="expertmesh"):
        task.prepare()
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(said) == (how != "empty"), said
    assert all("damaged: " in one and name in one for one in said)
