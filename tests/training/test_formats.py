"""Files with many texts in them, patterns, and several places with weights."""

import gzip
import importlib.util
import json
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import zstandard

import expertmesh as em
from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus, texts
from expertmesh.data.shards import prepare_tokens
from expertmesh.text.tokenizer import train_tokenizer

TEXTS = [f"text {i} of many\nwith a line of é\n" * (1 + i % 3) for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS))


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def json_lines(folder):
    (folder / "a.jsonl").write_text(LINES.replace("\n", "\n\n", 3))
    return folder / "a.jsonl", {}


def packed_json_lines(folder):
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(LINES)
    return folder / "a.jsonl.gz", {}


def json_lines_in_zstandard(folder):
    (folder / "a.ndjson.zst").write_bytes(zstandard.compress(LINES.encode()))
    return folder / "a.ndjson.zst", {}


def parquet(folder):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(60), "text": TEXTS}), folder / "a.parquet")
    return folder / "a.parquet", {}


def packed_parquet(folder):
    path, _ = parquet(folder)
    (folder / "a.parquet.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return folder / "a.parquet.gz", {}


def token_files(folder):
    """As Megatron's MMapIndexedDataset writes them, every other document in two sequences."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.save(str(folder / "tokenizer.json"))
    sequences, borders = [], [0]
    for number, text in enumerate(TEXTS):
        ids = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
        sequences += [ids[:5], ids[5:]] if number % 2 else [ids]
        borders.append(len(sequences))
    sizes = np.array([len(ids) for ids in sequences], dtype=np.int32)
    starts = np.concatenate(([0], 2 * np.cumsum(sizes[:-1]))).astype(np.int64)
    (folder / "a.bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sizes), len(borders))
    tail = sizes.tobytes() + starts.tobytes() + np.array(borders, dtype=np.int64).tobytes()
    (folder / "a.idx").write_bytes(head + tail)
    return folder / "a.bin", {"tokenizer": str(folder / "tokenizer.json")}


WRITERS = [
    json_lines,
    packed_json_lines,
    json_lines_in_zstandard,
    pytest.param(parquet, marks=needs("pyarrow")),
    pytest.param(packed_parquet, marks=needs("pyarrow")),
    token_files,
]


@pytest.mark.parametrize("write", WRITERS)
def test_the_texts_of_a_file_are_documents(write, tmp_path):
    path, options = write(tmp_path)
    corpus = load_corpus(TextConfig(path=str(path), validation_fraction=0.2, **options))
    found = [*texts(corpus.training), *texts(corpus.validation)]
    assert sorted(found) == sorted(TEXTS)
    assert corpus.num_skipped == 0 and len(corpus.validation) > 1


@pytest.mark.parametrize("write", WRITERS)
def test_they_are_found_in_a_folder_beside_plain_text(write, tmp_path):
    path, options = write(tmp_path)
    (tmp_path / "plain.txt").write_text("plain\n")
    if options:
        elsewhere = tmp_path.with_suffix(".json")
        Path(options["tokenizer"]).rename(elsewhere)
        options = {"tokenizer": str(elsewhere)}
    corpus = load_corpus(TextConfig(path=str(tmp_path), validation_fraction=0.2, **options))
    found = [*texts(corpus.training), *texts(corpus.validation)]
    assert sorted(found) == sorted([*TEXTS, "plain\n"]), path


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"body": "x"}', "lines have no text in 'text'"),
        ('{"text": 3}', "lines have no text in 'text'"),
        ('["text"]', "lines are not a JSON object"),
        ('{"text": "x', "lines are not a JSON object"),
        ('{"text": "\\ud800"}', "have half a character"),
    ],
)
def test_a_line_without_a_text_is_left_out_and_said(line, why, tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES + line + "\n")
    corpus = load_corpus(TextConfig(path=str(tmp_path / "a.jsonl")))
    assert corpus.num_skipped == 1
    (note,) = map(str, corpus.notes)
    assert why in note and "a.jsonl:61)" in note


def test_patterns_and_weights(tmp_path):
    """Twice, once and a half: as often as the weights say in training; validation has every text once."""
    for name in ("twice", "once", "half"):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}\n")
    places = (f"{tmp_path}/tw*:2", f"{tmp_path}/once", f"{tmp_path}/**/half:0.5")
    corpus = load_corpus(TextConfig(path=places, validation_fraction=0.25))
    plain = load_corpus(TextConfig(path=tuple(p.partition(":")[0] for p in places)))
    counts = {}
    for text in texts(corpus.training):
        counts.setdefault(text.split()[0], {}).setdefault(text, []).append(text)
    assert {len(copies) for copies in counts["twice"].values()} == {2}
    assert {len(copies) for copies in counts["once"].values()} == {1}
    halves = len(counts["half"])
    assert {len(copies) for copies in counts["half"].values()} == {1} and 5 < halves < 25
    validation = list(texts(corpus.validation))
    assert len(set(validation)) == len(validation)
    assert not set(validation) & {text for name in counts for text in counts[name]}
    assert corpus.digest != plain.digest


def test_a_text_stays_on_its_side_when_a_place_is_added(tmp_path):
    """One of validation is never trained on, in the other place neither, whatever it is called there."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    for i in range(60):
        (first / f"b{i}.txt").write_text(f"text {i}\n")
        (second / f"a{i}.txt").write_text(f"text {i}\n" if i % 2 else f"other {i}\n")
    alone, both = (
        load_corpus(TextConfig(path=places, validation_fraction=0.3))
        for places in (str(first), (str(first), str(second)))
    )
    trained = set(texts(both.training))
    assert len(alone.validation) > 9 and trained.isdisjoint(texts(alone.validation))
    assert trained.issuperset(texts(alone.training))
    assert any(text.startswith("other") for text in texts(both.validation))


@pytest.mark.parametrize("pattern", ["**", "**/*", "**/*.txt", "**/[a-z]*"])
def test_a_pattern_is_as_the_folder_with_all_that_it_matches(pattern, tmp_path):
    """Files stay whole, and no text is there twice, where folders match with what is in them."""
    folder = tmp_path / "texts"
    for i in range(60):
        path = folder / "sub" / "deep" / f"a{i}.txt" if i % 2 else folder / f"a{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{i} of many\n" * 200)
    plain = load_corpus(TextConfig(path=str(folder)))
    corpus = load_corpus(TextConfig(path=f"{folder}/{pattern}"))
    assert corpus.digest == plain.digest and len(plain.training + plain.validation) == 60
    (tmp_path / "more.txt").write_text("another text\n" * 200)
    both = load_corpus(TextConfig(path=(f"{folder}/{pattern}", f"{tmp_path}/more.txt:2")))
    names = [d.name for d in both.training + both.validation if d.name.startswith("0:")]
    assert sorted(names) == sorted(f"0:{d.name}" for d in plain.training + plain.validation)


def test_a_name_with_a_colon_is_a_path(tmp_path):
    (tmp_path / "a:2").write_text("a text with lines\n" * 200)
    corpus = load_corpus(TextConfig(path=str(tmp_path / "a:2")))
    assert corpus.source == str(tmp_path / "a:2")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no*thing", "matches nothing; give a text file"),
        ("nothing:2", "does not exist; give a text file"),
        (("a.txt:0", "b.txt"), "the weight must be above 0"),
        (("a.txt:1.2.3", "b.txt"), "the weight must be above 0"),
        (("a.txt:0.00001", "b.txt:0.00001"), "the weights leave no document to train on"),
        ("a.txt:2", "a weight says how often beside other paths"),
        ((), "must name a text"),
        (("a.txt", " "), "must not be empty"),
        ("a.bin", "name the tokenizer.json that made them"),
    ],
)
def test_mistakes(path, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a.bin", "a.idx"):
        (tmp_path / name).write_text("some text\n" * 200)
    with pytest.raises(em.ConfigError, match=text):
        load_corpus(TextConfig(path=path))


def test_mistakes_of_token_files(tmp_path):
    path, options = token_files(tmp_path)
    index = tmp_path / "a.idx"
    whole = index.read_bytes()
    for data, text in (
        (whole[:-8], "is damaged"),
        (b"x" + whole, "is no Megatron index"),
        (whole[:17] + b"\x63" + whole[18:], "is damaged"),
        (whole[:-8] + b"\xff" * 8, "is damaged"),
        (whole[:-1] + b"\x7f", "is damaged"),
        (whole[: -8 * 61 - 1] + b"\xff" + whole[-8 * 61 :], "is of a longer file, or damaged"),
    ):
        index.write_bytes(data)
        with pytest.raises(em.ConfigError, match=text):
            load_corpus(TextConfig(path=str(path), **options))
    index.write_bytes(whole)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(em.ConfigError, match="a.idx is of a longer file, or damaged; copy both"):
        load_corpus(TextConfig(path=str(path), **options))
    with pytest.raises(em.ConfigError, match="leave it out"):
        TextConfig(path="a.txt", tokenizer="tokenizer.json")


def test_tokens_of_weighted_places_are_prepared(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(LINES.replace("many", name))
    places = (str(tmp_path / "a.jsonl:3"), str(tmp_path / "b.jsonl"))
    sizes = []
    for path in (places, tuple(p.removesuffix(":3") for p in places)):
        config = TextConfig(path=path, cache_dir=str(tmp_path / "cache"), seq_len=16)
        sizes.append(len(prepare_tokens(config, vocab_size=300).training.tokens_N))
    assert sizes[0] > 1.5 * sizes[1]


class Rows(list):
    """What `datasets.load_dataset` returns, as far as it is used."""

    def __init__(self, rows, *columns):
        super().__init__(rows)
        self.column_names = list(columns)


class Library(ModuleType):
    """A stand-in for the package `datasets`: one dataset of each kind by name."""

    def __init__(self):
        super().__init__("datasets")
        self.__spec__ = ModuleSpec("datasets", None)
        self.asked = []

    def load_dataset(self, name, *, split):
        self.asked.append((name, split))
        return {
            "good": lambda: Rows([{"text": text} for text in TEXTS], "text"),
            "holes": lambda: Rows([{"text": None}, *({"text": t} for t in TEXTS)], "text"),
            "other": lambda: Rows([{"body": "x"}], "body", "title"),
            "empty": lambda: Rows([], "text"),
        }[name]()


@pytest.fixture
def library(monkeypatch):
    module = Library()
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_dataset_by_name(library, tmp_path):
    config = TextConfig(dataset="good", cache_dir=str(tmp_path), seq_len=16)
    corpus = load_corpus(config)
    assert library.asked == [("good", "train")]
    assert sorted([*texts(corpus.training), *texts(corpus.validation)]) == sorted(TEXTS)
    assert corpus.source == "dataset good" and corpus.num_skipped == 0
    data = prepare_tokens(config, vocab_size=300)
    size = sum(len(text.encode()) for text in TEXTS)
    assert data.training.num_bytes + data.validation.num_bytes == size
    assert load_corpus(TextConfig(dataset="holes")).num_skipped == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other", "data.dataset=other: its table has body, title, and none of what is read"),
        ("unknown", "data.dataset=unknown: cannot be loaded .*; check the name"),
        ("empty", "data.dataset=empty: has no text"),
    ],
)
def test_mistakes_of_a_dataset_by_name(library, name, says):
    with pytest.raises(em.ConfigError, match=says):
        load_corpus(TextConfig(dataset=name))


@needs("datasets")
def test_the_real_library_reads_a_folder_by_name(tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text(LINES)
    corpus = load_corpus(TextConfig(dataset=str(tmp_path / "mine")))
    assert sorted([*texts(corpus.training), *texts(corpus.validation)]) == sorted(TEXTS)
    with pytest.raises(em.ConfigError, match="cannot be loaded .*; check the name"):
        load_corpus(TextConfig(dataset=str(tmp_path / "nothing")))
