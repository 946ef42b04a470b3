"""The shapes in which people hold texts and conversations, in every kind of file, packed and plain."""

import csv
import gzip
import importlib.util
import io
import json

import pytest
import zstandard

import expertmesh as em
from expertmesh.config.text import TextConfig
from expertmesh.data.conversation_lines import checked
from expertmesh.data.corpus import load_corpus, texts

NUMBERS = range(8)


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def told(role, text):
    return {"from": role, "value": text}


def first(i):
    return [{"role": "system", "content": "s"}, *talk(f"q{i}", f"a{i}")]


SHAPES = {
    "text": (lambda i: {"id": i, "text": f'word, "{i}"\nand é\n'}, None),
    "messages": (lambda i: {"messages": talk(f"q{i}", f"a{i}")}, lambda i: talk(f"q{i}", f"a{i}")),
    "system beside messages": (
        lambda i: {"system": "s", "messages": talk(f"q{i}", f"a{i}")},
        first,
    ),
    "ShareGPT": (
        lambda i: {
            "id": i,
            "conversations": [told("system", "s"), told("human", f"q{i}"), told("gpt", f"a{i}")],
        },
        first,
    ),
    "ShareGPT with a system": (
        lambda i: {
            "conversations": [told("user", f"q{i}"), told("assistant", f"a{i}")],
            "system": "s",
        },
        first,
    ),
    "Alpaca": (
        lambda i: {"instruction": "do", "input": f"{i}, é", "output": f"a{i}"},
        lambda i: talk(f"do\n{i}, é", f"a{i}"),
    ),
    "Alpaca without input": (
        lambda i: {"instruction": f"do {i}", "input": "", "output": "a"},
        lambda i: talk(f"do {i}", "a"),
    ),
    "Dolly": (
        lambda i: {"instruction": "do", "context": f"c{i}", "response": "a", "category": "x"},
        lambda i: talk(f"do\nc{i}", "a"),
    ),
    "prompt": (
        lambda i: {"prompt": f"q{i}", "completion": f"a{i}"},
        lambda i: talk(f"q{i}", f"a{i}"),
    ),
    "prompt of messages": (
        lambda i: {"prompt": talk(f"q{i}"), "completion": talk("", f"a{i}")[1:]},
        lambda i: talk(f"q{i}", f"a{i}"),
    ),
    "history": (
        lambda i: {"instruction": f"q{i}", "output": "a", "history": [["b", "c"], ["d", "e"]]},
        lambda i: talk("b", "c", "d", "e", f"q{i}", "a"),
    ),
}


def in_lines(records):
    return "".join(json.dumps(one) + "\n\n" for one in records).encode()


def in_an_array(records):
    return json.dumps(records, indent=2, ensure_ascii=False).encode()


def in_an_array_on_a_line(records):
    return json.dumps(records).encode()


def in_a_table(separator):
    def write(records):
        file = io.StringIO(newline="")
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(records[0])
        for one in records:
            cells = [v if isinstance(v, str) else json.dumps(v) for v in one.values()]
            writer.writerow(cells)
        return file.getvalue().encode()

    return write


def in_parquet(records):
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), file, row_group_size=3)
    return file.getvalue()


def needs_arrow(*values):
    missing = importlib.util.find_spec("pyarrow") is None
    return pytest.param(*values, marks=pytest.mark.skipif(missing, reason="no pyarrow"))


FILES = [
    ("a.jsonl", in_lines),
    ("a.ndjson", in_lines),
    ("a.json", in_lines),
    ("a.json", in_an_array),
    ("a.json", in_an_array_on_a_line),
    ("a.jsonl", in_an_array),
    ("a.csv", in_a_table(",")),
    ("a.csv", in_a_table(";")),
    ("a.tsv", in_a_table("\t")),
    needs_arrow("a.parquet", in_parquet),
]
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def found_in(path, **options):
    corpus = load_corpus(TextConfig(path=str(path), validation_fraction=0.4, **options))
    found = sorted([*texts(corpus.training), *texts(corpus.validation)])
    assert corpus.num_skipped == 0 and corpus.training and corpus.validation
    return corpus, found


def cases():
    for file in FILES:
        name, write = getattr(file, "values", file)
        for shape in SHAPES:
            # a cell of a table is a text
            if shape != "prompt of messages" or not name.endswith(("csv", "tsv")):
                yield pytest.param(shape, name, write, marks=getattr(file, "marks", ()))


@pytest.mark.parametrize(("shape", "name", "write"), list(cases()))
def test_every_shape_is_read_from_every_file(tmp_path, shape, name, write):
    """Each as messages in JSON lines are, so that the cache is the same, too."""
    record, expected = SHAPES[shape]
    data = write([record(i) for i in NUMBERS])
    for ending, pack in PACKERS.items():
        (tmp_path / (name + ending)).write_bytes(pack(data))
        corpus, found = found_in(tmp_path / (name + ending))
        assert corpus.is_talk == (expected is not None)
        if expected is None:
            assert found == [record(i)["text"] for i in NUMBERS]
        else:
            talks = [checked({"messages": expected(i)}) for i in NUMBERS]
            assert [json.loads(one) for one in found] == sorted(
                talks, key=lambda t: json.dumps(t, sort_keys=True, ensure_ascii=False)
            )


BESIDE = {
    "'instruction' with 'output'": {"instruction": "do", "input": "", "output": "a"},
    "'messages'": {"messages": json.dumps(talk("q", "a"))},
    "": {"instruction": "do"},
}


@pytest.mark.parametrize(("name", "write"), [FILES[0], FILES[3], FILES[6], FILES[-1]])
@pytest.mark.parametrize("fields", BESIDE)
def test_a_text_beside_a_conversation_is_said(tmp_path, fields, name, write):
    """As Alpaca's own file has one."""
    path = tmp_path / name
    path.write_bytes(write([{**BESIDE[fields], "text": f"t{i}"} for i in NUMBERS]))
    corpus, found = found_in(path)
    assert found == [f"t{i}" for i in NUMBERS]

    def said(corpus):
        return [str(one) for one in corpus.notes if "learned whole" in str(one)]

    assert len(said(corpus)) == bool(fields) and all(fields in one for one in said(corpus))
    assert said(found_in(path, column="text")[0]) == []


def test_a_file_with_one_object_is_one_conversation(tmp_path):
    for i in NUMBERS:
        (tmp_path / f"{i}.json").write_text(json.dumps({"messages": talk("q", f"a{i}")}, indent=1))
    corpus, found = found_in(tmp_path)
    assert corpus.is_talk and len(found) == len(NUMBERS)


@pytest.mark.parametrize("kind", ["binary", "large_binary", "large_string"])
def test_columns_of_other_types(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = [f"text {i} é" for i in NUMBERS]
    raw = [text.encode() for text in values] if "binary" in kind else values
    column = pyarrow.array(raw, getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert found_in(tmp_path / "a.parquet")[1] == values


def test_a_column_that_is_there_twice(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    one = pyarrow.array([str(i) for i in NUMBERS])
    table = pyarrow.Table.from_arrays([one, one, one, one], names=["n", "n", "text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(em.ConfigError, match="a.parquet: has the column 'text' twice"):
        load_corpus(TextConfig(path=str(tmp_path / "a.parquet")))


def test_texts_of_another_encoding_in_a_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([f"caf\xe9 {i}".encode("latin-1") for i in NUMBERS])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    says = "rows are not UTF-8 text, but perhaps latin-1 .*; name its encoding, data.encoding=latin-1"
    with pytest.raises(em.ConfigError, match=says):
        load_corpus(TextConfig(path=str(tmp_path / "a.parquet")))
    assert found_in(tmp_path / "a.parquet", encoding="latin-1")[1][0].startswith("caf\xe9")


def test_messages_under_another_name(tmp_path):
    """As the chosen answers of preferences, or `text` as a list."""
    for name, options in (("chosen", {"column": "chosen"}), ("text", {})):
        records = [{name: talk("q", f"a{i}"), "rejected": talk("q", "no")} for i in NUMBERS]
        (tmp_path / "a.jsonl").write_bytes(in_lines(records))
        corpus, found = found_in(tmp_path / "a.jsonl", **options)
        assert corpus.is_talk and f"a{NUMBERS[-1]}" in found[-1] and "no" not in found[-1]


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", in_lines), ("a.csv", in_a_table(","))])
def test_a_text_under_another_name(tmp_path, name, write):
    (tmp_path / name).write_bytes(write([{"n": str(i), "review": f"good {i}"} for i in NUMBERS]))
    _, found = found_in(tmp_path / name, column="review")
    assert found == [f"good {i}" for i in NUMBERS]


OTHER = [{"question": "q", "answer": str(i)} for i in NUMBERS]
HEADER = {"version": 1}
TALK = {"messages": talk("q", "a")}
REFUSED = {
    "unknown fields": (
        "a.jsonl",
        in_lines(OTHER),
        (
            "a.jsonl: its first object has question, answer, and none of what is read .text; messages; "
            "conv.*data.column=NAME"
        ),
    ),
    "unknown fields of an array": (
        "a.json",
        in_an_array(OTHER),
        "a.json: its first entry has question, answer",
    ),
    "unknown columns": (
        "a.csv",
        in_a_table(",")(OTHER),
        "a.csv: its first line has question, answer",
    ),
    "no header": (
        "a.tsv",
        b"one\ttwo\nthree\tfour\n",
        "a.tsv: its first line has one, two, and none",
    ),
    "a wrapped array": (
        "a.json",
        json.dumps({"data": [TALK]}).encode(),
        "its first entry has data, and none",
    ),
    "texts without fields": ("a.json", b'["one", "two"]', "holds no JSON object; write one"),
    "no JSON": ("a.json", b"{\n 'text': 1}", r"is no JSON .line 2.; correct it"),
    "a cut array": ("a.json", b'[{"text": "a"},\n{"text": "b"', r"is no JSON .line 2.; correct it"),
    "two arrays": ("a.json", b'[{"text": "a"}]\n[]', r"is no JSON .line 2.; correct it"),
    "a header": (
        "a.jsonl",
        in_lines([HEADER, TALK, TALK]),
        "a.jsonl, line 1: has no 'messages', as others of the file do, but version; correct the line",
    ),
    "a header of an array": (
        "a.json",
        in_an_array([HEADER, TALK]),
        "a.json, entry 1: has no 'messages'",
    ),
    "a role": (
        "a.json",
        in_an_array([{"conversations": [told("cat", "x")]}] * 2),
        "entry .: message 1 has role 'cat'",
    ),
    "a cell too many": (
        "a.csv",
        b"text,n\na,1\n\nb, c,2\n",
        "a.csv, line 4: has 3 values for 2 columns; quote what has ','",
    ),
    "a column twice": ("a.csv", b"text,n,text\na,1,b\n", "a.csv: has the column 'text' twice"),
    "an answer that is no text": (
        "a.jsonl",
        in_lines([{"instruction": f"q{i}", "output": i} for i in NUMBERS]),
        "has instruction, output, and 'instruction' with 'output' is no text in any record",
    ),
    "an open quote": ("a.csv", b'text\na\n"b\n', "a.csv: is no table .line 3"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case, packed):
    """In one line, with the fields that there are."""
    name, data, words = REFUSED[case]
    if packed:
        name, data = f"{name}.gz", gzip.compress(data)
        words = words.replace("a.csv", "a.csv.gz").replace("a.json:", "a.json.gz:")
        words = words.replace("a.json,", "a.json.gz,").replace("a.jsonl", "a.jsonl.gz").replace("a.tsv", "a.tsv.gz")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(em.ConfigError, match=words) as found:
        load_corpus(TextConfig(path=str(tmp_path / name)))
    assert "\n" not in str(found.value)


def test_files_beside_texts_that_hold_no_records_are_texts_and_said(tmp_path):
    """A program's package.json; not those that a pattern asks for. Lines that hold none are left out."""
    for i in NUMBERS:
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "package.json").write_text(text := json.dumps({"name": "x", "version": "1"}))
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "lines.jsonl").write_bytes(in_lines(OTHER))
    corpus = load_corpus(TextConfig(path=str(tmp_path), validation_fraction=0.4))
    found = [*texts(corpus.training), *texts(corpus.validation)]
    assert len(found) == len(NUMBERS) + 2 and text in found and corpus.num_skipped == 1
    said = [note for note in map(str, corpus.notes) if "data.validation_fraction" not in note]
    assert "1 files hold no records that are read (for example lines.jsonl: its first object has question" in said[0]
    assert "learned as they stand: 2 files" in said[1] and ": its first " in said[1]
    with pytest.raises(em.ConfigError, match="package.json: its first entry has name, version"):
        load_corpus(TextConfig(path=str(tmp_path / "*.json")))


def test_lines_and_rows_are_counted_from_one(tmp_path):
    """As an editor counts them, blank lines too, wherever they are named."""
    good = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in NUMBERS)
    (tmp_path / "a.jsonl").write_text(f'\n\n{good}{{"body": "x"}}\n')
    (tmp_path / "b.json").write_text(f'[{good.replace(chr(10), ",")} {{"body": "x"}}]')
    (tmp_path / "c.csv").write_text('n,text\n1,"two\nlines"\n2,more\n3,\n')
    for name, where in (("a.jsonl", "a.jsonl:11)"), ("b.json", "b.json, entry 9)")):
        notes = load_corpus(TextConfig(path=str(tmp_path / name), validation_fraction=0.4)).notes
        (note,) = (one for one in map(str, notes) if "left out" in one)
        assert "have no text in 'text'" in note and where in note


def test_a_developer_is_the_system():
    """As in OpenAI's newer conversations."""
    given = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert checked({"messages": given})["messages"] == [{**given[0], "role": "system"}, given[1]]
    assert given[0]["role"] == "developer"
