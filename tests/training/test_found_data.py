"""Text as people have it: large and small files, links, packed files, odd names, what cannot be read, damaged
caches."""

import gzip
import logging
import os

import numpy as np
import pytest
import zstandard

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus, texts
from expertmesh.data.shards import prepare_tokens


def lines(count, word="line"):
    return "".join(f"{word} {i} of a text that has been found\n" for i in range(count))


def small(folder, count=12):
    for i in range(count):
        (folder / f"small{i}.txt").write_text(lines(8, f"small {i}"))


def large_beside_small(folder):
    (folder / "large.txt").write_text(lines(8_000))
    (folder / "small.txt").write_text(lines(50, "small"))


def large_and_packed(folder):
    with gzip.open(folder / "large.txt.gz", "wt") as file:
        file.write(lines(8_000))
    (folder / "small.txt").write_text(lines(50, "small"))


def two_large(folder):
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(lines(4_000, name))


def large_by_link(folder):
    (folder.parent / "elsewhere.txt").write_text(lines(8_000))
    (folder / "link.txt").symlink_to(folder.parent / "elsewhere.txt")
    (folder / "small.txt").write_text(lines(50, "small"))


def large_in_a_sample(folder):
    """A file that is small beside all, but all there is to what is used of it."""
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(lines(4_000, name))


@pytest.mark.parametrize("write", [large_beside_small, large_and_packed, two_large, large_by_link, large_in_a_sample])
def test_a_large_file_is_cut_so_that_the_split_is_near_what_was_asked_for(tmp_path, write):
    folder = tmp_path / "texts"
    folder.mkdir()
    write(folder)
    most = 200_000 if write is large_in_a_sample else None
    config = TextConfig(path=str(folder), validation_fraction=0.2, max_bytes=most)
    corpus = load_corpus(config)
    training, validation = (sum(d.num_bytes for d in side) for side in (corpus.training, corpus.validation))
    assert 0.1 < validation / (training + validation) < 0.4
    names = {d.name.partition("#")[0] for d in corpus.training + corpus.validation}
    if most is None:
        assert names == {path.name for path in folder.iterdir()}
        together = sorted(corpus.training + corpus.validation, key=lambda d: d.name)
        found = "".join(texts([d for d in together if d.name.startswith(("large", "link", "a"))]))
        assert found in (lines(8_000), lines(4_000, "a"))


@pytest.mark.parametrize(
    "sizes, fraction, words",
    [
        ([400, 1], 0.05, None),  # cut, so near enough
        ([3, 3], 0.05, ["50.0% of the text is for validation, not the 5.0%", "there are 2"]),
        ([3, 3, 3], 0.01, ["of data.validation_fraction", "give more"]),
        ([3, 3], 0.99, ["not the 99.0%"]),
        ([3, 3], 0.5, None),
    ],
)
def test_a_split_far_from_what_was_asked_for_is_said(tmp_path, sizes, fraction, words):
    for i, size in enumerate(sizes):
        # Below the smallest piece, files stay whole.
        (tmp_path / f"f{i}.txt").write_text(f"{i} " + "x" * 128 * size + "\n")
    corpus = load_corpus(TextConfig(path=str(tmp_path), validation_fraction=fraction))
    said = " ".join(map(str, corpus.notes))
    assert bool(said) == (words is not None)
    assert all(word in said for word in words or ()), said


def name_that_is_not_utf8(folder):
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text(lines(8, "odd"))
    return 13, []


def folder_name_that_is_not_utf8(folder):
    inner = folder / os.fsdecode(b"d\xff")
    inner.mkdir()
    (inner / "x.txt").write_text(lines(8, "odd"))
    return 13, []


def packed(folder):
    (folder / "more.txt.gz").write_bytes(gzip.compress(lines(8, "packed").encode()))
    return 13, []


def packed_in_two_members(folder):
    parts = [gzip.compress(lines(4, word).encode()) for word in ("one", "two")]
    (folder / "more.GZ").write_bytes(b"".join(parts))
    return 13, []


def packed_and_cut_off(folder):
    (folder / "cut.gz").write_bytes(gzip.compress(os.urandom(400))[:-20])
    return 12, ["cannot be read", "cut.gz"]


def not_packed_at_all(folder):
    (folder / "fake.gz").write_text("text")
    return 12, ["cannot be read", "fake.gz"]


def cut_off_by_zstandard(folder):
    (folder / "cut.zst").write_bytes(zstandard.compress(os.urandom(400))[:-20])
    return 12, ["cannot be read, damaged: it is cut off", "cut.zst"]


def not_packed_by_zstandard(folder):
    (folder / "fake.jsonl.zst").write_text("text")
    return 12, ["cannot be read, damaged", "fake.jsonl.zst"]


def packed_binary(folder):
    (folder / "some.bin.gz").write_bytes(gzip.compress(b"\0\xff"))
    return 12, ["files are binary", "some.bin.gz"]


def unreadable(folder):
    # Its memory is a file that even root cannot read from its beginning.
    (folder / "mem.txt").symlink_to("/proc/self/mem")
    return 12, ["cannot be read", "Input/output error", "mem.txt"]


def large_and_unreadable(folder):
    # Linux says that it has 4096 bytes, and that it has no value when it is read.
    (folder / "speed.txt").symlink_to("/sys/class/net/lo/speed")
    return 12, ["cannot be read, Invalid argument", "speed.txt"]


def link_to_a_file(folder):
    (folder.parent / "far.txt").write_text(lines(8, "far"))
    (folder / "near.txt").symlink_to(folder.parent / "far.txt")
    return 13, []


def link_to_a_folder(folder):
    (folder.parent / "far").mkdir()
    (folder.parent / "far" / "x.txt").write_text(lines(8, "far"))
    (folder / "near").symlink_to(folder.parent / "far")
    return 13, []


def link_to_the_folder_itself(folder):
    (folder / "loop").symlink_to(folder)
    return 12, []


def link_to_nothing(folder):
    (folder / "gone.txt").symlink_to(folder / "nothing")
    return 12, ["no regular files", "gone.txt"]


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return 12, ["no regular files", "pipe"]


def several_kinds(folder):
    os.mkfifo(folder / "pipe")
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(b"\0")
    return 12, ["left out: 1 names are no regular files (for example pipe); 2 files are binary"]


@pytest.mark.parametrize(
    "add",
    [
        name_that_is_not_utf8,
        folder_name_that_is_not_utf8,
        packed,
        packed_in_two_members,
        packed_and_cut_off,
        not_packed_at_all,
        cut_off_by_zstandard,
        not_packed_by_zstandard,
        packed_binary,
        unreadable,
        large_and_unreadable,
        link_to_a_file,
        link_to_a_folder,
        link_to_the_folder_itself,
        link_to_nothing,
        pipe,
        several_kinds,
    ],
)
def test_what_is_in_a_folder_is_used_or_said(tmp_path, add):
    folder = tmp_path / "texts"
    folder.mkdir()
    small(folder)
    count, words = add(folder)
    corpus = load_corpus(TextConfig(path=str(folder), validation_fraction=0.3))
    assert len(corpus.training) + len(corpus.validation) == count
    said = " ".join(note for note in map(str, corpus.notes) if "left out" in note)
    assert bool(said) == bool(words) and all(word in said for word in words), said
    said.encode()  # it can be printed
    assert all(list(texts(side)) for side in (corpus.training, corpus.validation))


@pytest.mark.parametrize("most", [None, 3000])
def test_text_that_max_bytes_leaves_out_is_said(tmp_path, most):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"{i}" + "x" * 999)
    notes = [str(note) for note in load_corpus(TextConfig(path=str(tmp_path), max_bytes=most)).notes]
    said = [note for note in notes if "data.max_bytes=none" in note]
    assert len(said) == (most is not None)
    if most is not None:  # each of these files is cut in two, as a lone one is
        assert "12 of 18 pieces of text are not" in said[0]


def test_a_folder_of_links_is_a_folder_of_texts(tmp_path):
    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir(), links.mkdir()
    small(real)
    for path in real.iterdir():
        (links / path.name).symlink_to(path)
    one, other = (load_corpus(TextConfig(path=str(p))) for p in (real, links))
    assert one.digest == other.digest


def test_a_packed_file_is_the_same_text_as_the_file(tmp_path):
    text = lines(900).encode()
    parts = text[:999], text[999:]  # packed one after the other, they are one file
    for name, data in (
        ("a.txt", text),
        ("b.gz", b"".join(map(gzip.compress, parts))),
        ("c.zst", b"".join(map(zstandard.compress, parts))),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        corpus = load_corpus(TextConfig(path=str(path)))
        documents = sorted(corpus.training + corpus.validation, key=lambda d: d.name)
        assert "".join(texts(documents)) == lines(900) and corpus.validation


def test_pieces_of_a_text_with_long_letters_are_cut_where_letters_end(tmp_path):
    text = lines(900, "café \U0001f600")
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = load_corpus(TextConfig(path=str(tmp_path / "a.txt")))
    documents = sorted(corpus.training + corpus.validation, key=lambda d: d.name)
    assert "".join(texts(documents)) == text
    assert sum(d.num_bytes for d in documents) == len(text.encode())


def test_a_text_of_long_letters_is_cut_as_finely_as_another(tmp_path):
    """Pieces are measured in bytes, as the whole is: in characters, Japanese would be a third as many."""
    counts = []
    for letter in ("a", "\u3042"):
        (tmp_path / "a.txt").write_text((letter * 39 + "\n") * 900, encoding="utf-8")
        corpus = load_corpus(TextConfig(path=str(tmp_path / "a.txt")))
        counts.append(len(corpus.training) + len(corpus.validation))
    assert counts[0] <= counts[1]


def test_damaged_tokens_are_made_anew(tmp_path, caplog):
    """As all that tests/data/test_cache_entry.py damages."""
    small(tmp_path, 30)
    config = TextConfig(path=str(tmp_path), cache_dir=str(tmp_path / ".cache"), seq_len=8)
    tokens = prepare_tokens(config, vocab_size=300)
    entry = tokens.tokenizer_path.parent
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    (entry / "training.bin").write_bytes(before["training.bin"][:-7])
    again = prepare_tokens(config, vocab_size=300)
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before
    assert "training.bin has another checksum; it is made anew" in caplog.text
    assert np.asarray(again.training.tokens_N).tobytes() == before["training.bin"]


def test_what_is_to_be_known_of_the_corpus_is_said_once(tmp_path, caplog):
    small(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\0")
    config = TextConfig(path=str(tmp_path), cache_dir=str(tmp_path / ".cache"), seq_len=8)
    with caplog.at_level(logging.WARNING, "expertmesh.data"):
        prepare_tokens(config, vocab_size=300)
    assert sum("left out: 1 files are binary" in r.getMessage() for r in caplog.records) == 1
