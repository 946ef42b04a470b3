"""Documents: selection, the split without a leak, what is not text."""

import random
import sysconfig
from pathlib import Path

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus, texts
from expertmesh.data.files import find_files


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def many(count, seed=0):
    generator = random.Random(seed)
    return {f"f{i}.txt": f"{i} {generator.random()}\n" * 20 for i in range(count)}


def test_no_text_is_on_both_sides_even_if_files_are_copies(tmp_path):
    files = many(60)
    files |= {f"copy/{name}": text for name, text in files.items()}
    corpus = load_corpus(TextConfig(path=str(write(tmp_path, files)), validation_fraction=0.3))
    training, validation = set(texts(corpus.training)), set(texts(corpus.validation))
    assert training and validation and not training & validation
    assert len(corpus.training) + len(corpus.validation) == 120
    assert 0.1 < len(corpus.validation) / 120 < 0.5


def test_a_file_stays_on_its_side_when_others_come(tmp_path):
    files = many(80)
    some = write(tmp_path / "some", dict(list(files.items())[:50]))
    more = write(tmp_path / "more", files)
    side = {}
    for folder in (some, more):
        corpus = load_corpus(TextConfig(path=str(folder), validation_fraction=0.2))
        sides = {d.name: "training" for d in corpus.training}
        sides |= {d.name: "validation" for d in corpus.validation}
        side[folder] = sides
    assert all(side[more][name] == where for name, where in side[some].items())


def test_max_bytes_takes_a_subset_that_does_not_depend_on_the_folder_order(tmp_path):
    folder = write(tmp_path, many(60))
    everything = load_corpus(TextConfig(path=str(folder)))
    total = sum(d.num_bytes for d in everything.training + everything.validation)
    part = load_corpus(TextConfig(path=str(folder), max_bytes=total // 3))
    size = sum(d.num_bytes for d in part.training + part.validation)
    longest = max(d.num_bytes for d in everything.training)
    assert total // 3 <= size <= total // 3 + longest
    names = [d.name for d in everything.training + everything.validation]
    assert {d.name for d in part.training + part.validation} < set(names)
    assert part.digest != everything.digest


def test_the_default_is_the_standard_library_without_installed_packages():
    corpus = load_corpus(TextConfig(max_bytes=300_000))
    names = [d.name for d in corpus.training + corpus.validation]
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)
    stdlib = Path(sysconfig.get_path("stdlib"))
    everything = {p.as_posix() for p in find_files(stdlib, follow_links=False)[0]}
    assert "argparse.py" in everything and not any("site-packages" in n for n in everything)


def test_one_file_is_cut_into_documents_at_line_ends(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(4000))
    path = tmp_path / "book.txt"
    path.write_text(text)
    corpus = load_corpus(TextConfig(path=str(path)))
    documents = sorted(corpus.training + corpus.validation, key=lambda d: d.name)
    assert "".join(texts(documents)) == text
    assert all(t.endswith("\n") for t in texts(documents))
    assert len(documents) > 20 and corpus.validation


def test_one_file_with_one_endless_line_is_cut_too(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("".join(chr(97 + i * i % 23) for i in range(50_000)))
    corpus = load_corpus(TextConfig(path=str(path)))
    assert len(corpus.training) > 10 and corpus.validation


def test_files_that_are_not_text_are_left_out_and_counted(tmp_path):
    files = many(10) | {"a.bin": b"\x00\x01", "latin.txt": b"caf\xe9", ".git/x": "hidden"}
    corpus = load_corpus(TextConfig(path=str(write(tmp_path, files))))
    assert corpus.num_skipped == 2
    assert len(corpus.training) + len(corpus.validation) == 10
