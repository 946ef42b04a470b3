"""Debian's packages of LibreOffice's help become parallel files, without a line of the test in training."""

import gzip
import io
import tarfile

import pytest
import zstandard
from benchmarks.claims.lohelp import _heading_and_body, extract, main, segments

from expertmesh_families.seq2seq.config import LANGUAGE
from expertmesh_families.seq2seq.parallel_text import read_lines

PAGE = """<html><head><title>no</title></head><body><p>no id here</p>
<h1 id="hd_id1" dir="auto">{0} head of page {1} here</h1>
<table><tr><td id="par_id9"><p id="par_id2">{0} press <span class="switchinline"><span hidden="true" class="MAC"><span
 class="key">Command</span></span><span hidden="true"><span>Ctrl</span></span></span>+F &amp; go to<br>page {1}.</p></td></tr></table>
<p id="par_id3">short</p><p id="par_id4">the same words on every page</p></body></html>"""  # noqa: E501


def archive_of(code, pages, packing):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w" if packing == "zst" else f"w:{packing}") as archive:
        for name, html in pages.items():
            info = tarfile.TarInfo(f"./usr/share/libreoffice/help/{code}/text/{name}.html")
            info.size = len(html.encode())
            archive.addfile(info, io.BytesIO(html.encode()))
    return zstandard.compress(data.getvalue()) if packing == "zst" else data.getvalue()


def package_of(path, code, pages, *, packing="xz"):
    """As Debian packs it, or Ubuntu (zst)."""
    parts = [
        (b"debian-binary", b"2.0\n"),
        (b"control.tar.xz", b"odd"),
        (f"data.tar.{packing}".encode(), archive_of(code, pages, packing)),
    ]
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, data in parts:
            header = name.ljust(16) + b"0".ljust(12) + b"0".ljust(6) * 2 + b"644".ljust(8)
            file.write(header + str(len(data)).encode().ljust(10) + b"`\n" + data + b"\n" * (len(data) % 2))


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    # letters, because lines that differ in digits alone count as one
    names = [f"page{chr(97 + i // 10)}{chr(97 + i % 10)}" for i in range(60)]
    for code, word in (("en-US", "english"), ("de", "deutsch"), ("pt-BR", "english")):
        pages = {name: PAGE.format(f"{word} {name[4:]}" * 3, name) for name in names}
        package_of(folder / f"libreoffice-help-{code.lower()}_7.4_all.deb", code, pages)
    return folder


def test_paragraphs_by_their_ids():
    found = segments(PAGE.format("x", "y"))
    assert found["hd_id1"] == "x head of page y here"
    assert found["par_id2"] == "x press Ctrl+F & go to page y."
    assert set(found) == {"hd_id1", "par_id2", "par_id3", "par_id4", "par_id9"}
    twice = segments('<td id="par_id1">in <p id="par_id1">out</p></b>side</td><p id="par_id2">open')
    assert twice == {"par_id1": "in side"}


def test_packages_become_parallel_files(packages, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["--packages", str(packages), "--output", str(output)]) == 0
    assert "lines in de en pt" in capsys.readouterr().out
    lines = {
        (split, code): read_lines(output / f"{split}.{code}.gz")
        for split in ("train", "val", "test")
        for code in ("en", "de", "pt")
    }
    everything = []
    for split in ("train", "val", "test"):
        english, german, brazilian = (lines[split, code] for code in ("en", "de", "pt"))
        assert len(english) == len(german) == len(brazilian)
        for a, b, c in zip(english, german, brazilian, strict=True):
            # the line that is the same in all languages counts as untranslated
            assert b == ("" if a == "the same words on every page" else a.replace("english", "deutsch"))
            assert c == "", "what equals the English text is not translated"
        everything += english
    assert len(set(everything)) == len(everything) and "short" not in everything
    assert len(lines["train", "en"]) > 80 and lines["test", "en"]
    assert everything.count("the same words on every page") == 1
    again = extract(packages, tmp_path / "again")
    for path in again.folder.iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes()


def test_headings_and_what_is_below_them(packages, tmp_path, capsys):
    output = tmp_path / "headings"
    words = ["--headings", "--packages", str(packages), "--output", str(output)]
    assert main(words) == 0
    assert "lines in de en pt" in capsys.readouterr().out
    splits = {split: read_lines(output / f"{split}.en.gz") for split in ("train", "val", "test")}
    assert sum(map(len, splits.values())) == 60 and len(splits["train"]) > 40
    assert len(set().union(*splits.values())) == 60, "no heading comes twice"
    for split, headings in splits.items():
        bodies, german, body = (read_lines(output / f"{split}.{code}.gz") for code in ("en_body", "de", "de_body"))
        assert len(headings) == len(bodies) == len(german)
        for i, heading in enumerate(headings):
            assert "head of page" in heading and heading not in bodies[i]
            assert bodies[i].endswith("short the same words on every page")
            assert german[i] == heading.replace("english", "deutsch")
            assert body[i] == bodies[i].replace("english", "deutsch")
        # pt is English here
        assert not any(read_lines(output / f"{split}.pt.gz"))
        assert not any(read_lines(output / f"{split}.pt_body.gz"))


@pytest.mark.parametrize(
    "body, words", [("a b " * 100, 100), ("長い文" * 100, 1), ("x" * 150, 1)], ids=["words", "signs", "short"]
)  # fmt: skip
def test_bodies_are_cut(body, words):
    heading, found = _heading_and_body({"par_id1": body.strip(), "hd_id2": "", "hd_id3": "H"})
    assert heading == "H" and body.startswith(found)
    assert len(found.split()) == words and len(found) == {100: 199, 1: min(len(body), 200)}[words]


def test_what_is_not_there_is_one_line(packages, tmp_path, capsys):
    folder = tmp_path / "damaged"
    folder.mkdir()
    package = folder / "libreoffice-help-de.deb"
    package_of(package, "de", {"a": PAGE})
    whole = package.read_bytes()
    for content, text in (
        (None, "has LibreOffice's help in no language"),
        (gzip.compress(b"no package"), "no readable Debian package"),
        (whole.replace(b"7zXZ", b"8zXZ"), "no readable Debian package"),
        (whole[:-50], "no readable Debian package"),
    ):
        package.unlink(missing_ok=True)
        if content is not None:
            package.write_bytes(content)
        words = ["--packages", str(folder), "--output", str(tmp_path / "o")]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_each_language_has_files_that_can_be_read(tmp_path):
    """Two kinds of Portuguese are two languages, and no name has a dash, which stands in pairs."""
    codes = ("en-US", "en-GB", "pt", "pt-BR", "zh-TW")
    for code in codes:
        path = tmp_path / f"libreoffice-help-{code}.deb"
        packing = "gz" if code == "pt" else "zst"
        package_of(path, code, {"a": PAGE.format(code, "a")}, packing=packing)
    found = extract(tmp_path, tmp_path / "out")
    assert found.languages == ("en", "en_GB", "pt", "pt_BR", "zh_TW")
    assert all(LANGUAGE.fullmatch(code) for code in found.languages)
    lines = [read_lines(tmp_path / "out" / f"train.{code}.gz") for code in ("pt", "pt_BR")]
    lines += [read_lines(tmp_path / "out" / f"{split}.pt.gz") for split in ("val", "test")]
    assert all("pt-BR" not in line for line in lines[0] + lines[2] + lines[3])


def test_files_of_ones_own_are_not_replaced(packages, tmp_path, capsys):
    words = ["--packages", str(packages), "--output", str(tmp_path)]
    mine = tmp_path / "val.de.gz"
    for content in (b"mine", gzip.compress(b"mine")):
        mine.write_bytes(content)
        assert main(words) == 2
        assert f"output={mine}: is there with other lines" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [mine] and mine.read_bytes() == content
    assert main([*words[:-1], str(mine)]) == 2
    assert "is a file or below a file" in capsys.readouterr().err
    mine.unlink()
    for _ in range(2):
        assert main(words) == 0
    assert len(list(tmp_path.iterdir())) == 9
