"""One rule of encoding: the first bytes, else the name that is given, else UTF-8; wherever text is read."""

import codecs
import json

import pytest

import expertmesh as em
from expertmesh.cli.config_file import read_config_file
from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus, texts
from expertmesh.data.encoding import NotTextError, decoded
from expertmesh.data.files import TextFile

TEXT = "".join(f"café {i}, où\r\nœuvre\n" for i in range(600))
LATIN = TEXT.replace("œ", "oe")
CODINGS = {
    "utf-8": (TEXT.encode(), None),
    "utf-8 with a mark": (codecs.BOM_UTF8 + TEXT.encode(), None),
    "utf-16-le": (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), None),
    "utf-16-be": (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), None),
    "utf-32-le": (codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"), None),
    "utf-32-be": (codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"), None),
    "utf-16 without a mark": (TEXT.encode("utf-16-le"), "utf-16"),
    "cp1252": (TEXT.encode("cp1252"), "cp1252"),
    "latin-1": (LATIN.encode("latin-1"), "latin-1"),
    "utf-7, whose letters depend on others": (TEXT.encode("utf-7"), "utf-7"),
    "a mark counts more than the name": (codecs.BOM_UTF8 + TEXT.encode(), "latin-1"),
}


def whole(corpus):
    documents = sorted(corpus.training + corpus.validation, key=lambda d: d.name)
    return list(texts(documents))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_text_is_the_same_in_every_encoding(tmp_path, coding):
    """A lone file that is cut, files of a folder, JSON lines, an array, a table, a configuration and parallel text."""
    data, encoding = CODINGS[coding]
    expected = decoded(data, encoding)
    assert expected == (LATIN if coding == "latin-1" else TEXT)
    codec = coding.split()[0].rstrip(",") if encoding is None else encoding
    codec = "utf-8" if coding.startswith("a mark") else codec
    mark = data[: len(data) - len(expected.encode(codec))] if encoding != "utf-16" else b""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        codec_without = "utf-16-le" if encoding == "utf-16" else codec
        path.write_bytes(mark + text.encode(codec_without))
        return path

    def load(path):
        return load_corpus(TextConfig(path=str(path), encoding=encoding, validation_fraction=0.4))

    path = write("a.txt", expected)
    assert path.read_bytes() == data
    corpus = load(path)
    assert "".join(whole(corpus)) == expected and len(whole(corpus)) > 20
    plain = tmp_path / "plain" / "a.txt"
    plain.parent.mkdir()
    plain.write_bytes(expected.encode())
    same = load_corpus(TextConfig(path=str(plain), validation_fraction=0.4))
    assert "".join(whole(same)) == expected
    for i in range(12):
        write(f"folder/{i}.txt", f"é {i}")
    assert sorted(whole(load(tmp_path / "folder"))) == sorted(f"é {i}" for i in range(12))
    records = [{"text": f"é {i}\u2028"} for i in range(12)] if codec.startswith("utf") else []
    records = records or [{"text": f"é {i}"} for i in range(12)]
    lines = [json.dumps(one, ensure_ascii=False) for one in records]
    for name, text in (
        ("a.jsonl", "\n".join(lines)),
        ("a.json", f"[{','.join(lines)}]"),
        ("a.csv", "text\n" + "\n".join(one["text"] for one in records)),
    ):
        assert sorted(whole(load(write(name, text)))) == sorted(one["text"] for one in records)


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_places_know_the_mark(tmp_path, codec):
    path = tmp_path / "run.yaml"
    path.write_bytes("recipe: gpt-moe-test\ntrain: {run_dir: é}\n".encode(codec))
    assert read_config_file(str(path)) == ({"train": {"run_dir": "é"}}, "gpt-moe-test")


@pytest.mark.parametrize(
    ("data", "said", "encoding"),
    [
        (b"caf\xe9", "is not UTF-8 text, but perhaps latin-1", "latin-1"),
        (b"\x93caf\xe9\x94", "is not UTF-8 text, but perhaps cp1252", "cp1252"),
        ("café".encode("utf-16-le"), "is not UTF-8 text, but perhaps utf-16-le", "utf-16-le"),
        ("café".encode("utf-16-be"), "is not UTF-8 text, but perhaps utf-16-be", "utf-16-be"),
        ("日本語の文章".encode("shift_jis"), "is not UTF-8 text, but of another encoding", "NAME"),
        (
            "我们都是人".encode("big5", "ignore") + b"\x81@",
            "is not UTF-8 text, but of another encoding",
            "NAME",
        ),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff", "is a binary file", None),
        (b"a\0b\xff", "is a binary file", None),
        (b"\0", "is a binary file", None),
    ],
)
def test_what_is_no_utf_8(tmp_path, data, said, encoding):
    with pytest.raises(NotTextError, match=said) as found:
        decoded(data)
    assert found.value.encoding == (None if encoding == "NAME" else encoding)
    (tmp_path / "a.txt").write_bytes(data)
    fix = "give text" if encoding is None else f"name its encoding, data.encoding={encoding}, or"
    with pytest.raises(em.ConfigError, match=rf"a.txt: {said}.*; {fix}"):
        load_corpus(TextConfig(path=str(tmp_path / "a.txt")))
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    notes = load_corpus(TextConfig(path=str(tmp_path), validation_fraction=0.4)).notes
    (note,) = (one for one in map(str, notes) if "left out" in one)
    perhaps = "not UTF-8 text" + ("" if encoding == "NAME" else f", but perhaps {encoding}")
    reason = "files are binary" if encoding is None else perhaps
    assert f"{reason} (for example a.txt)" in note


def test_a_text_is_the_example_and_all_are_named_when_asked(tmp_path, caplog):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"\xff\xd8\0\1")
    for name in ("c.txt", "d.txt"):
        (tmp_path / name).write_bytes(b"caf\xe9")
    config = TextConfig(path=str(tmp_path), validation_fraction=0.4)
    with caplog.at_level("DEBUG", "expertmesh.data"):
        (note,) = (one for one in map(str, load_corpus(config).notes) if "left out" in one)
    assert "left out: 2 files are not UTF-8 text, but perhaps latin-1 (for example" in note
    assert note.index("latin-1") < note.index("2 files are binary")
    said = [r.getMessage() for r in caplog.records if r.levelname == "DEBUG"]
    assert sorted(text[-5:] for text in said) == ["a.jpg", "b.jpg", "c.txt", "d.txt"]


NAMES = ["no-such", "base64", "rot13", "undefined"]  # an empty one: tests/cli/test_empty_values.py
NO_ENCODING = "encoding=.*: must be an encoding of text.*latin-1"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_no_encoding(name):
    with pytest.raises(em.ConfigError, match=NO_ENCODING):
        TextConfig(path="a", encoding=name)


@pytest.mark.parametrize("options", [{"encoding": "latin-1"}, {"column": "x"}])
def test_options_of_reading_need_something_to_read(options):
    with pytest.raises(em.ConfigError, match="has no effect without path"):
        TextConfig(**options)


def test_a_piece_that_begins_with_a_mark_keeps_it(tmp_path):
    """In the middle of a text it is a letter."""
    text = ("\ufeff" * 39 + "\n") * 600
    (tmp_path / "a.txt").write_text("a" + text, encoding="utf-8")
    found = whole(load_corpus(TextConfig(path=str(tmp_path / "a.txt"))))
    assert "".join(found) == "a" + text
    assert TextFile(tmp_path / "a.txt")() == "a" + text
