"""Texts that a user may have meant otherwise: what is said of them before a run begins."""

import gzip
import json

import pytest

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus
from expertmesh.data.shards import prepare_tokens
from expertmesh.errors import ConfigError

LINES = "".join(f'{{"text": "words of line {i}"}}\n' for i in range(60))
SAID = (
    "files hold JSON objects on lines, which their names do not say (for example {}); to read their texts, end the "
    "names in .jsonl"
)
FILES = {
    "lines": ("a.txt", LINES, True),
    "no ending": ("lines", LINES, True),
    "blanks before": ("a.txt", "\n\n  " + LINES, True),
    "marked": ("a.txt", "\ufeff" + LINES, True),
    "a single line": ("a.txt", '{"text": "' + "words " * 300 + '"}', True),
    "packed": ("a.txt.gz", LINES, True),
    "named": ("a.jsonl", LINES, False),
    "text": ("a.txt", "words\n" * 300, False),
    "text that begins with a brace": ("a.txt", "{a} is a set\n" * 300, False),
    "one object, then text": ("a.txt", '{"a": 1}\n' + "words\n" * 300, False),
    "arrays": ("a.txt", "[1, 2]\n" * 300, False),
    "a program": ("a.js", "{\n  let a = 1;\n}\n" * 90, False),
}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a folder"])
@pytest.mark.parametrize("name", FILES)
def test_json_lines_under_another_name_are_said(name, alone, tmp_path):
    file, text, is_said = FILES[name]
    data = text.encode()
    (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    if not alone:
        (tmp_path / "b.md").write_text("other words\n" * 300)
        (tmp_path / "c.md").write_text("more words\n" * 300)
    path = tmp_path / file if alone else tmp_path
    notes = [str(note) for note in load_corpus(TextConfig(path=str(path))).notes]
    found = [note for note in notes if "JSON objects" in note]
    assert len(found) == is_said
    assert not found or SAID.format(file) in found[0]


ENTRIES = [{"text": f"words of entry {i}", "id": i} for i in range(60)]
ARRAYS = {
    "an array": ("a.txt", json.dumps(ENTRIES), True),
    "an array over lines": ("a.txt", "\ufeff\n" + json.dumps(ENTRIES, indent=1), True),
    "no ending": ("entries", json.dumps(ENTRIES), True),
    "packed": ("a.txt.gz", json.dumps(ENTRIES), True),
    "objects over lines": ("a.txt", "\n".join(json.dumps(e, indent=1) for e in ENTRIES), True),
    "one object over lines": ("a.txt", json.dumps({"entries": ENTRIES}, indent=1), True),
    "long entries": ("a.txt", json.dumps([{"text": "words " * 3000}] * 9), True),
    "numbers": ("a.txt", "[1, 2]\n" * 300, False),
    "a quotation": ("a.txt", "[a]\n" * 300, False),
    "one object, then text": ("a.txt", '{\n"a": 1}\n' + "words\n" * 300, False),
    "of a program": ("a.map", json.dumps(ENTRIES), False),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_json_that_is_not_on_lines_is_said(name, tmp_path):
    file, text, is_said = ARRAYS[name]
    data = text.encode()
    (tmp_path / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    notes = [str(note) for note in load_corpus(TextConfig(path=str(tmp_path / file))).notes]
    found = [note for note in notes if "which their names do not say" in note]
    assert len(found) == is_said
    assert not found or f"over several lines, which their names do not say (for example {file})" in found[0]


STRANGE = "Das ist Text {}: \u00e4\u00f6\u00fc. "


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_left_out_is_said_where_it_leaves_too_little(count, tmp_path, caplog):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_bytes(STRANGE.format(number).encode("latin-1") * 50)
    for number in range(count):
        (tmp_path / f"README{number}").write_text(f"short {number}\n")
    config = TextConfig(path=str(tmp_path), cache_dir=str(tmp_path / "cache"), seq_len=64)
    with pytest.raises(ConfigError) as caught:
        prepare_tokens(config, vocab_size=300)
    said = str(caught.value) + caplog.text
    assert ("cannot be split" if count == 1 else "split has only") in said
    assert "left out: 9 files are not UTF-8 text, but perhaps latin-1 (for example" in said
    assert count == 2 or "name its encoding" in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["same"] * 200, "200 documents with 1 different text cannot be split"),
        (["only"], "1 document with 1 different text cannot be split"),
    ],
)
def test_equal_texts_are_counted_once(texts, words, tmp_path):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_corpus(TextConfig(path=str(tmp_path)))
