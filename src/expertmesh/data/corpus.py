"""Documents: where the text comes from, which of it is used, and on which side of the split it is.

A document is a name and a way to read its text. Nothing is kept in memory but names, sizes and digests, so a corpus
may be larger than memory.
"""

import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertmesh.config.text import TextConfig
from expertmesh.errors import ConfigError

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_PIECE_BYTES = 65_536
_LEAST_PIECES = 40
_LEAST_PIECE_BYTES = 512


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
        name: relative to the corpus, with forward slashes; unique.
        num_bytes: length of the text in UTF-8.
        digest: SHA-256 of the text.
        read: returns the text.
    """

    name: str
    num_bytes: int
    digest: bytes
    read: Callable[[], str] = field(compare=False)


@dataclass(frozen=True)
class Corpus:
    """The documents of a run, split without a leak.

    Attributes:
        source: what the corpus is, in words.
        training: documents to train on, in order of a hash of their names.
        validation: documents to evaluate on; none of them has the text of a training document.
        num_skipped: files left out because they are not UTF-8 text.
        digest: hex SHA-256 of all names and texts, in the order above, and of the split.
    """

    source: str
    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    num_skipped: int
    digest: str


def load_corpus(config: TextConfig) -> Corpus:
    """Find, select and split the documents. Reads every selected document once.

    Documents are ordered by a hash of their names. With `max_bytes`, the first of them are used until their texts have
    that many bytes. Documents of identical text go to the same side: the side of the smallest of their names.

    Args:
        config: `path`, `dataset`, `max_bytes` and `validation_fraction` count.

    Returns:
        The corpus.

    Raises:
        ConfigError: the path is missing, is binary or has no text, or too few documents for two sides.
    """
    source, candidates = _candidates(config)
    documents, num_skipped, num_bytes = [], 0, 0
    for name, read in sorted(candidates, key=lambda c: (_hash("order", c[0]), c[0])):
        if config.max_bytes is not None and num_bytes >= config.max_bytes:
            break
        text = read()
        if text is None:
            num_skipped += 1
            continue
        if not text:
            continue
        data = text.encode()
        num_bytes += len(data)
        documents.append(Document(name, len(data), hashlib.sha256(data).digest(), _reader(read)))
    if not documents:
        raise ConfigError(
            f"{_option(config)}: has no text ({num_skipped} files are not UTF-8 text, the others are empty); "
            "give text files in UTF-8"
        )
    training, validation = split_documents(documents, config.validation_fraction)
    if not training or not validation:
        raise ConfigError(
            f"{_option(config)}: {len(documents)} different documents cannot be split into training and validation; "
            "give more text"
        )
    digest = hashlib.sha256()
    for side in (training, validation):
        digest.update(f"{len(side)}\n".encode())
        for document in side:
            digest.update(document.name.encode() + b"\0" + document.digest)
    return Corpus(source, tuple(training), tuple(validation), num_skipped, digest.hexdigest())


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, in the given order; equal texts are on one side.

    The side depends on the name only (of the smallest name of that text), so a file stays on its side when others come
    or go. Should chance leave a side empty, the text whose name is nearest to the border changes sides.

    Args:
        documents: with unique names.
        validation_fraction: expected share of the texts for validation, in (0, 1).

    Returns:
        Training, validation. One of them is empty only if there are fewer than two different texts.
    """
    owner: dict[bytes, str] = {}
    for document in documents:
        owner[document.digest] = min(document.name, owner.get(document.digest, document.name))
    place = {digest: _hash("split", name) / 2**64 for digest, name in owner.items()}
    border = validation_fraction
    if len(place) > 1:
        places = sorted(place.values())
        # Strictly between the first and the last, so that no side is empty.
        border = min(max(border, places[0] * (1 + 1e-12) + 1e-18), places[-1])
    training = [d for d in documents if place[d.digest] >= border]
    validation = [d for d in documents if place[d.digest] < border]
    return training, validation


def texts(documents: Sequence[Document]) -> Iterator[str]:
    """The texts of documents, read one after the other."""
    for document in documents:
        yield document.read()


Candidate = tuple[str, Callable[[], str | None]]


def _candidates(config: TextConfig) -> tuple[str, list[Candidate]]:
    if config.dataset is not None:
        return f"dataset {config.dataset}", _dataset(config.dataset)
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in _files(root) if p.suffix == ".py"]
        return "the source of Python's standard library", _named(root, found)
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError(f"data.path={config.path}: does not exist; give a text file or a folder")
    if not path.is_dir():
        return str(path), _pieces(path)
    found = [p for p in _files(path) if not any(part.startswith(".") for part in p.parts)]
    if not found:
        raise ConfigError(f"data.path={config.path}: the folder has no files; give text files")
    if len(found) == 1:
        return str(path), _pieces(path / found[0])
    return str(path), _named(path, found)


def _files(root: Path) -> list[Path]:
    """Regular files below a folder, relative to it; no links, no installed packages, no caches."""
    found = []
    for folder, subfolders, names in root.walk() if hasattr(root, "walk") else _walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [
            (folder / name).relative_to(root) for name in names if not (folder / name).is_symlink()
        ]
    return [path for path in found if (root / path).is_file()]


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """`Path.walk` for Python 3.11."""
    entries = sorted(root.iterdir())
    subfolders = [e.name for e in entries if e.is_dir() and not e.is_symlink()]
    yield root, subfolders, [e.name for e in entries if not e.is_dir()]
    for name in subfolders:
        yield from _walk(root / name)


def _named(root: Path, found: Sequence[Path]) -> list[Candidate]:
    return [(path.as_posix(), _FileText(root / path)) for path in found]


@dataclass(frozen=True)
class _FileText:
    path: Path

    def __call__(self) -> str | None:
        """The text, or None if this is not UTF-8 text."""
        return decode_text(self.path.read_bytes())


def decode_text(data: bytes) -> str | None:
    """UTF-8 text, or None for anything else; a NUL byte is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _pieces(path: Path) -> list[Candidate]:
    """A single file as many documents, cut at line ends, so that it can be split."""
    text = decode_text(path.read_bytes())
    if text is None:
        raise ConfigError(f"data.path={path}: is a binary file, text must be UTF-8; give text")
    size = min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, len(text) // _LEAST_PIECES))
    pieces, start = [], 0
    while start < len(text):
        end = start + size
        newline = text.find("\n", end, end + size)
        end = newline + 1 if newline >= 0 else end
        pieces.append(text[start:end])
        start = end
    return [(f"{path.name}#{i:06d}", _Constant(piece)) for i, piece in enumerate(pieces)]


@dataclass(frozen=True)
class _Constant:
    text: str

    def __call__(self) -> str | None:
        return self.text


def _dataset(name: str) -> list[Candidate]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"data.dataset={name}: needs the package 'datasets'; install it with: pip install 'expertmesh[train]'"
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"data.dataset={name}: cannot be loaded ({reason}); check the name"
        ) from None
    if "text" not in rows.column_names:
        raise ConfigError(
            f"data.dataset={name}: needs a 'text' column, has {', '.join(rows.column_names)}; choose another dataset"
        )
    return [(f"{i:012d}", _Row(rows, i)) for i in range(len(rows))]


@dataclass(frozen=True)
class _Row:
    rows: Any
    index: int

    def __call__(self) -> str | None:
        text = self.rows[self.index]["text"]
        return text if isinstance(text, str) else None


def _reader(read: Callable[[], str | None]) -> Callable[[], str]:
    def read_text() -> str:
        text = read()
        if text is None:
            raise ConfigError("data: a file changed while it was read; start again")
        return text

    return read_text


def _hash(purpose: str, name: str) -> int:
    """64 bits that depend on the purpose and the name only."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:8], "big")


def _option(config: TextConfig) -> str:
    if config.dataset is not None:
        return f"data.dataset={config.dataset}"
    return f"data.path={config.path if config.path is not None else 'none'}"
