"""Texts that a user may have meant otherwise: what is said of them before a run begins."""

import gzip

import pytest

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus
from expertmesh.errors import ConfigError

LINES = "".join(f'{{"text": "words of line {i}"}}\n' for i in range(60))
SAID = "files hold JSON objects on lines, which their names do not say (for example {}); to read their texts, end the names in .jsonl"
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
