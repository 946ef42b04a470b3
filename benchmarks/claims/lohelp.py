"""Parallel text in up to sixteen languages from LibreOffice's help, as Debian packs it (`libreoffice-help-LANG`, MPL-2.0).

    apt-get download libreoffice-help-en-us libreoffice-help-de libreoffice-help-fr
    python -m benchmarks.claims.lohelp --packages .               # where recipes look for the name lohelp
    python -m benchmarks.claims.lohelp --packages . --headings    # pages' headings, and what is below them as languages LANG_body

In every language a page has the same name and its paragraphs have the same ids, so (page, id) aligns them.
"""

import argparse
import gzip
import hashlib
import io
import lzma
import re
import sys
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from expertmesh.config.base import expanded, user_cache_dir
from expertmesh.data.files import unpacked_zst
from expertmesh.errors import ConfigError

INSTALLED = Path("/usr/share/libreoffice/help")
CODES = {"en-US": "en", "pt-BR": "pt", "zh-CN": "zh"}
"""Codes of folders that have a shorter name as files, unless another folder has that one; others have "_" for "-"."""
FEWEST_WORDS, MOST_WORDS = 4, 60
_SPLITS = (("train", 0.90), ("val", 0.94), ("test", 1.0))
_GRAM = 6
_SHARE = 0.8
_MOST_BODY_WORDS, _MOST_BODY_CHARACTERS, _CHARACTERS_OF_A_WORD = 100, 200, 20
_TAGS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "td", "li"})
_ID = re.compile(r"(par|hd|bm)_id|tit$")
_VOID = frozenset({"br", "img", "meta", "link", "input", "hr"})
_PAGE = re.compile(r"(?:^|/)usr/share/libreoffice/help/([^/]+)/(text/.+\.html)$")

Page = dict[str, str]
"""Texts by id."""


class Extracted(NamedTuple):
    """What was written.

    Attributes:
        folder: where.
        languages: their codes.
        num_lines: of each split.
    """

    folder: Path
    languages: tuple[str, ...]
    num_lines: dict[str, int]


class _Segments(HTMLParser):
    """Collects the paragraphs of a page; what only a Mac shows is left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: Page = {}
        # of each open tag: the id that begins there, whether it is hidden, where its text goes (outside of all ids nowhere)
        self._open: list[tuple[str, str | None, bool, list[str]]] = [("", None, False, [])]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self.handle_data(" ")
            return
        values = dict(attrs)
        name = values.get("id") or ""
        begins = name if tag in _TAGS and _ID.match(name) else None
        _, _, hidden, texts = self._open[-1]
        hidden = hidden or values.get("class") == "MAC"
        self._open.append((tag, begins, hidden, texts if begins is None else []))

    def handle_endtag(self, tag: str) -> None:
        if all(opened != tag for opened, *_ in self._open):
            return
        opened = None
        while opened != tag:
            opened, begins, _, texts = self._open.pop()
            if begins is not None:
                self.found[begins] = " ".join("".join(texts).split())

    def handle_data(self, data: str) -> None:
        _, _, hidden, texts = self._open[-1]
        if not hidden:
            texts.append(data)


def segments(html: str) -> Page:
    """The paragraphs, headings and cells of a page by their ids, blanks squeezed."""
    parser = _Segments()
    parser.feed(html)
    parser.close()
    return parser.found


def extract(source: Path, output: Path) -> Extracted:
    """Write `train`, `val` and `test` files of all languages that are there, line i parallel in all, blank where untranslated.

    Lines have 4 to 60 English words, and none comes twice. A page is in one split, by a hash of its name. Of validation and test
    lines those are left out that training has in other signs, or more than 80% of whose groups of six words it has.

    Args:
        source: a folder with Debian packages, or with the help itself as it is installed.
        output: folder for SPLIT.LANG.gz.

    Raises:
        ConfigError: there is no help in two languages, one of them English, a package is damaged, or the folder has such files with
            other lines.
    """
    pages = _read(source)
    languages = _checked_languages(pages, source)
    lines = _split(pages["en"])
    files = {
        f"{split}.{code}.gz": [_translated(pages, code, page, name) for page, name in places]
        for split, places in lines.items()
        for code in languages
    }
    _write(output, files)
    return Extracted(output, languages, {split: len(places) for split, places in lines.items()})


def extract_headings(source: Path, output: Path) -> Extracted:
    """Write what a page says and what it is called, to learn to give a text in one language its heading in another.

    A line is a page. `SPLIT.LANG.gz` has its heading, `SPLIT.LANG_body.gz` its first 100 words below (of languages without blanks
    between words its first 200 characters). Splits are those of `extract`. Of pages with one heading the first is kept, training first; where a
    language lacks one of the two, both are blank.

    Args:
        source: see `extract`.
        output: folder for the files.

    Raises:
        ConfigError: see `extract`.
    """
    pages = _read(source)
    languages = _checked_languages(pages, source)
    parts = {
        code: {name: _heading_and_body(page) for name, page in found.items()}
        for code, found in pages.items()
    }
    english = parts["en"]
    kept: dict[str, list[str]] = {split: [] for split, _ in _SPLITS}
    seen: set[str] = set()
    for split, names in kept.items():
        for name in sorted(english):
            heading, body = english[name]
            if _split_of(name) == split and heading and body and heading not in seen:
                seen.add(heading)
                names.append(name)

    def pair(code: str, name: str) -> tuple[str, str]:
        heading, body = parts[code].get(name, ("", ""))
        is_english = code != "en" and heading == english[name][0]  # then nobody translated it
        return ("", "") if is_english or not heading or not body else (heading, body)

    files: dict[str, list[str]] = {}
    for split, names in kept.items():
        for code in languages:
            pairs = [pair(code, name) for name in names]
            for ending, column in (("", 0), ("_body", 1)):
                files[f"{split}.{code}{ending}.gz"] = [texts[column] for texts in pairs]
    _write(output, files)
    return Extracted(output, languages, {split: len(names) for split, names in kept.items()})


def _write(output: Path, files: Mapping[str, list[str]]) -> None:
    """Write lines as packed files, each by one rename.

    Raises:
        ConfigError: a file has other lines already, or there can be no such folder.
    """
    texts = {name: "".join(f"{line}\n" for line in lines).encode() for name, lines in files.items()}
    missing = []
    for name, text in texts.items():
        path = output / name
        if not path.exists():
            missing.append(name)
        elif not _has(path, text):
            raise ConfigError(
                "output", path, "is there with other lines", "remove it, or choose another folder"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "output", output, "is a file or below a file", "choose a folder"
        ) from None
    for name in missing:
        partial = output / f".{name}.partial"
        partial.write_bytes(gzip.compress(texts[name], mtime=0))
        partial.rename(output / name)


def _has(path: Path, text: bytes) -> bool:
    try:
        return gzip.decompress(path.read_bytes()) == text
    except (OSError, EOFError, zlib.error):
        return False


def _heading_and_body(page: Page) -> tuple[str, str]:
    """The first heading of a page, and the beginning of its paragraphs; '' where there is none."""
    heading = next((text for name, text in page.items() if name.startswith("hd_id") and text), "")
    body = " ".join(text for name, text in page.items() if name.startswith("par_id") and text)
    words = body.split(" ")
    if len(body) > _MOST_BODY_CHARACTERS and len(words) * _CHARACTERS_OF_A_WORD < len(body):
        return heading, body[:_MOST_BODY_CHARACTERS]
    return heading, " ".join(words[:_MOST_BODY_WORDS])


def _checked_languages(pages: Mapping[str, object], source: Path) -> tuple[str, ...]:
    languages = tuple(sorted(pages))
    if "en" not in languages or len(languages) < 2:
        raise ConfigError(
            f"{source}: has LibreOffice's help in {', '.join(languages) or 'no language'}; it takes English and another one: "
            "apt-get download libreoffice-help-en-us libreoffice-help-de, then: python -m benchmarks.claims.lohelp --packages ."
        )
    return languages


def _split_of(page: str) -> str:
    """By a hash of the page's name."""
    digest = hashlib.sha256(page.encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return next(name for name, border in _SPLITS if place < border)


def _translated(pages: Mapping[str, Mapping[str, Page]], code: str, page: str, name: str) -> str:
    text = pages[code].get(page, {}).get(name, "")
    return "" if code != "en" and text == pages["en"][page][name] else text


def _split(english: Mapping[str, Page]) -> dict[str, list[tuple[str, str]]]:
    """(page, id) of the lines of each split; training chooses first."""
    places: dict[str, list[tuple[str, str]]] = {split: [] for split, _ in _SPLITS}
    for page in sorted(english):
        places[_split_of(page)] += [
            (page, name)
            for name, text in english[page].items()
            if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS
        ]
    seen: set[str] = set()
    trained: set[tuple[str, ...]] = set()
    for split, found in places.items():
        kept = []
        for page, name in found:
            text = english[page][name]
            letters = "".join(filter(str.isalpha, text.lower()))
            grams = _grams(text)
            known = sum(gram in trained for gram in grams) / max(len(grams), 1)
            if letters in seen or (split != "train" and known > _SHARE):
                continue
            seen.add(letters)
            kept.append((page, name))
            if split == "train":
                trained.update(grams)
        places[split] = kept
    return places


def _grams(text: str) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)]


def _read(source: Path) -> dict[str, dict[str, Page]]:
    """Pages by language."""
    found: dict[str, dict[str, Page]] = defaultdict(dict)
    packages = sorted(source.glob("libreoffice-help-*.deb")) if source.is_dir() else []
    members = (member for path in packages for member in _members(path))
    for code, page, html in members if packages else _files(source):
        found[code][page] = segments(html)
    return {_language(code, found): pages for code, pages in found.items()}


def _language(code: str, codes: Mapping[str, object]) -> str:
    """The code of a folder as the ending of a file: each another, and without a dash, which stands in pairs."""
    short = CODES.get(code, code)
    return (code if short in codes else short).replace("-", "_")


def _files(folder: Path) -> Iterator[tuple[str, str, str]]:
    for path in sorted(folder.glob("*/text/**/*.html")):
        code, *rest = path.relative_to(folder).parts
        try:
            yield code, "/".join(rest), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(
                f"{path}: is not UTF-8 text, as LibreOffice's help is; install it again"
            ) from None


def _members(package: Path) -> Iterator[tuple[str, str, str]]:
    """(code of the language, page, HTML) of all pages in a Debian package: an `ar` archive with a tar archive in it."""
    try:
        data = package.read_bytes()
        start = len(b"!<arch>\n")
        while start + 60 <= len(data):
            name, size = (
                data[start : start + 16].decode().strip(" /"),
                int(data[start + 48 : start + 58]),
            )
            start += 60
            if start + size > len(data):
                raise ValueError("it is cut off")
            if name.startswith("data.tar"):
                packed = io.BytesIO(data[start : start + size])
                file = unpacked_zst(packed, what=f"{package}") if name.endswith(".zst") else packed
                with tarfile.open(fileobj=file, mode="r|*") as archive:
                    yield from _pages(archive)
                return
            start += size + size % 2
        raise ValueError("no data")
    except (ValueError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{package}: is no readable Debian package ({reason}); download it again"
        ) from None


def _pages(archive: tarfile.TarFile) -> Iterator[tuple[str, str, str]]:
    for member in archive:
        match = _PAGE.search(member.name)
        file = archive.extractfile(member) if match and member.isfile() else None
        if match is not None and file is not None:
            yield match[1], match[2], file.read().decode()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims.lohelp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--packages",
        default=str(INSTALLED),
        metavar="DIR",
        help=f"folder with libreoffice-help-*.deb, or with the help itself ({INSTALLED})",
    )
    parser.add_argument("--output", metavar="DIR", help="where the files go (the cache folder)")
    parser.add_argument("--headings", action="store_true", help="headings instead of lines")
    parser.add_argument(
        "--if-missing", action="store_true", help="do nothing where the files are there already"
    )
    options = parser.parse_args(argv)
    try:
        usual = user_cache_dir() / ("lohelp-headings" if options.headings else "lohelp")
        output = usual if options.output is None else expanded(options.output)
        if options.if_missing and any(output.glob("train.*")):
            return 0
        make = extract_headings if options.headings else extract
        found = make(expanded(options.packages), output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = ", ".join(f"{count:,} {split}" for split, count in found.num_lines.items())
    print(f"{found.folder}: {counts} lines in {' '.join(found.languages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
