"""Documents: where the text comes from, which of it is used, and on which side of the split it is.

A document is a name and a way to read its text. Nothing is kept in memory but names, sizes and digests (and the text of
packed files that are cut), so a corpus may be larger than memory.
"""

import hashlib
import importlib.util
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.config.text import TextConfig
from expertmesh.data.conversation_lines import ConversationLine
from expertmesh.data.files import (
    NOT_A_FILE,
    NOT_READABLE,
    NOT_TEXT,
    LeftOut,
    TextFile,
    find_files,
    is_packed,
    printable,
)
from expertmesh.data.formats import COLUMN, given, is_companion, rows_of
from expertmesh.data.news import Progress
from expertmesh.data.paths import WeightedPath, find_paths
from expertmesh.errors import ConfigError, Line, named

_PIECE_BYTES = 65_536
_LEAST_PIECES = 40
_LEAST_PIECE_BYTES = 512
# A split is said to be far from what was asked for beyond this ratio.
_FAR = 3.0


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
        name: relative to the corpus, with forward slashes; unique.
        num_bytes: length of the text in UTF-8.
        digest: SHA-256 of the text.
        read: returns the text.
        place: number of its entry of `data.path`; its name begins with it where there are several.
        own_name: its name in that place alone.
    """

    name: str
    num_bytes: int
    digest: bytes
    read: Callable[[], str] = field(compare=False)
    place: int = 0
    own_name: str = ""


@dataclass(frozen=True)
class Corpus:
    """The documents of a run, split without a leak.

    Attributes:
        source: what the corpus is, in words.
        training: documents to train on, in order of a hash of their names.
        validation: documents to evaluate on; none of them has the text of a training document.
        num_skipped: files left out: not UTF-8 text, not readable, no regular files.
        digest: hex SHA-256 of all names and texts, in the order above, and of the split.
        notes: what a user should know of it, a line each: files left out, a split far from what was asked for.
        is_talk: whether the documents are conversations, as JSON (`expertmesh.data.conversation_lines`).
    """

    source: str
    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    num_skipped: int
    digest: str
    notes: tuple[Line, ...] = ()
    is_talk: bool = False


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
    source, candidates, left_out = _candidates(config)
    documents, num_bytes, left_unread = [], 0, 0
    kinds: dict[bool, str] = {}
    progress = Progress("read", total=config.max_bytes)
    ordered = sorted(candidates, key=lambda c: (_hash("order", c[0]), c[0]))
    for number, (name, read, place, own_name) in enumerate(ordered):
        if config.max_bytes is not None and num_bytes >= config.max_bytes:
            left_unread = len(ordered) - number
            break
        try:
            text = read()
            data = None if text is None else text.encode()
        except OSError as error:
            left_out.add(f"{NOT_READABLE}, {error.strerror or error}", name)
            continue
        except UnicodeEncodeError:  # half a character, as JSON can have
            data = None
        if data is None:
            left_out.add(NOT_TEXT, name)
            continue
        if not data:
            continue
        kinds.setdefault(isinstance(read, ConversationLine), name)
        num_bytes += len(data)
        progress.at(num_bytes)
        digest_of_text = hashlib.sha256(data).digest()
        documents.append(
            Document(name, len(data), digest_of_text, _reader(read), place, own_name or name)
        )
    progress.finish()
    if not documents:
        why = (
            f"{left_out.total} files are left out: {left_out}" if left_out.total else "it is empty"
        )
        raise ConfigError(f"{_option(config)}: has no text ({why}); give text files in UTF-8")
    if len(kinds) > 1:
        raise ConfigError(
            f"{_option(config)}: {kinds[True]} is a conversation and {kinds[False]} a text; train on one, then on the other "
            f"({named('train.init_from')})"
        )
    training, validation = split_documents(documents, config.validation_fraction)
    if not training or not validation:
        raise ConfigError(
            f"{_option(config)}: {len(documents)} different documents cannot be split into training and validation; "
            "give more text"
        )
    notes = _note_of_split(training, validation, config)
    if left_out.total:
        notes.append(f"{_option(config)}: {left_out.total} files are left out: {left_out}")
    if left_unread and (config.path is not None or config.dataset is not None):
        notes.append(
            f"{_option(config)}: only {num_bytes / 1000000.0:,.1f} MB are used and {left_unread:,} of {len(ordered):,} pieces "
            f"of text are not, by {named('data.max_bytes')}; for all of them: {named('data.max_bytes', 'none')}"
        )
    training = _weighted(training, config)
    if not training:
        raise ConfigError(
            f"{_option(config)}: the weights leave no document to train on; raise them, or give more text"
        )
    digest = hashlib.sha256()
    for side in (training, validation):
        digest.update(f"{len(side)}\n".encode())
        for document in side:
            digest.update(os.fsencode(document.name) + b"\0" + document.digest)
    return Corpus(
        source,
        tuple(training),
        tuple(validation),
        left_out.total,
        digest.hexdigest(),
        tuple(map(Line, notes)),
        is_talk=True in kinds,
    )


def _note_of_split(
    training: Sequence[Document], validation: Sequence[Document], config: TextConfig
) -> list[str]:
    """A line where whole documents made a split far from what was asked for."""
    sizes = [sum(document.num_bytes for document in side) for side in (training, validation)]
    share, wanted = sizes[1] / sum(sizes), config.validation_fraction
    ratios = (
        share / wanted,
        wanted / share,
        (1 - share) / (1 - wanted),
        (1 - wanted) / (1 - share),
    )
    if max(ratios) <= _FAR:
        return []
    note = (
        f"{_option(config)}: {share:.1%} of the text is for validation, not the {wanted:.1%} of "
        f"{named('data.validation_fraction')}: documents stay whole, and there are {len(training) + len(validation)}; give "
        "more, or another fraction"
    )
    return [note]


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, in the given order; equal texts are on one side.

    The side depends on the name in its place only (of a text that is there several times: that in the first place, the smallest
    one there), so a document stays on its side when other files come or go, and when places are added behind its own. Should
    chance leave a side empty, the text whose name is nearest to the border changes sides.

    Args:
        documents: with unique names.
        validation_fraction: expected share of the texts for validation, in (0, 1).

    Returns:
        Training, validation. One of them is empty only if there are fewer than two different texts.
    """
    owner: dict[bytes, tuple[int, str]] = {}
    for document in documents:
        mine = (document.place, document.own_name or document.name)
        owner[document.digest] = min(mine, owner.get(document.digest, mine))
    place = {digest: _hash("split", name) / 2**64 for digest, (_, name) in owner.items()}
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


class Candidate(NamedTuple):
    """A document that may be chosen.

    Attributes:
        name: see `Document`.
        read: returns its text; None: it is not text.
        place: see `Document`.
        own_name: see `Document`; empty: the name.
    """

    name: str
    read: Callable[[], str | None]
    place: int = 0
    own_name: str = ""


def _candidates(config: TextConfig) -> tuple[str, list[Candidate], LeftOut]:
    if config.dataset is not None:
        return f"dataset {config.dataset}", _dataset(config.dataset), LeftOut()
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        # These documents are always whole, so that a program is on one side.
        files = [path for path in find_files(root, follow_links=False)[0] if path.suffix == ".py"]
        return "the source of Python's standard library", _whole(root, files), LeftOut()
    places = find_paths(config.path)
    if len(places) == 1:
        return places[0].name, *_of_place(places[0], config)
    candidates, left_out = [], LeftOut()
    for number, place in enumerate(places):
        found, without = _of_place(place, config)
        left_out.add_all(without)
        candidates += [Candidate(f"{number}:{c.name}", c.read, number, c.name) for c in found]
    return f"{len(places)} places from {places[0].name}", candidates, left_out


def _of_place(place: WeightedPath, config: TextConfig) -> tuple[list[Candidate], LeftOut]:
    """The documents of a file, or of a folder; all that a pattern matches is as one folder."""
    root, files, left_out = place.root, list[Path](), LeftOut()
    if len(place.paths) == 1:
        (root,) = place.paths
        if not root.is_dir():
            return _of_one_file(root, config), left_out
    for path in place.paths:
        if path.is_dir():
            found, without = find_files(path)
            left_out.add_all(without)
            files += [path / p for p in found if not any(n.startswith(".") for n in p.parts)]
        elif path.is_file():
            files.append(path)
        else:
            left_out.add(NOT_A_FILE, str(path))
    files = [path for path in files if not is_companion(path)]
    if not files:
        why = f" ({left_out})" if left_out.total else ""
        raise ConfigError(f"{_option(config)}: the folder has no files{why}; give text files")
    if len(files) == 1 and not left_out.total:
        return _of_one_file(files[0], config), left_out
    names = [path.relative_to(root) for path in files]
    return list(_of_folder(root, names, config, left_out)), left_out


def _weighted(training: Sequence[Document], config: TextConfig) -> list[Document]:
    """Training documents as often as their places' weights say, the fraction of a weight by a hash of the name."""
    if config.path is None or config.dataset is not None:
        return list(training)
    weights = [place.weight for place in find_paths(config.path)]
    copies: list[list[Document]] = [[] for _ in range(math.ceil(max(weights)))]
    for document in training:
        weight = weights[document.place]
        chance = _hash("weight", document.name) / 2**64
        for number in range(int(weight) + (chance < weight % 1)):
            copies[number].append(document)
    return [document for one in copies for document in one]


def _rows(path: Path, name: str, config: TextConfig) -> list[Candidate] | None:
    """The texts of a file that holds many; None: it is one text."""
    rows = rows_of(path, tokenizer=config.tokenizer)
    if rows is None:
        return None
    return [
        Candidate(f"{name}:{r.line}" if isinstance(r, ConversationLine) else f"{name}#{i:09d}", r)
        for i, r in enumerate(rows)
    ]


def _whole(root: Path, found: Iterable[Path]) -> list[Candidate]:
    return [Candidate(path.as_posix(), TextFile(root / path)) for path in found]


def _of_one_file(path: Path, config: TextConfig) -> list[Candidate]:
    """A single file as many documents; what is wrong with it is the user's business."""
    if not path.is_file():  # a pipe or a device would be waited for, or read for ever
        raise ConfigError(
            "data.path",
            printable(str(path)),
            "is no regular file, and text is read more than once",
            "write it to a file and give that",
        )
    try:
        rows = _rows(path, path.name, config)
        if rows is not None:
            return rows
        size = TextFile(path).num_bytes()
        pieces = _pieces(path, path.name, _piece_bytes(size, config), size)
    except OSError as error:
        raise ConfigError(
            f"{_option(config)}: cannot be read ({error.strerror or error}); change its permissions, or give another file"
        ) from None
    if pieces is None:
        raise ConfigError("data.path", path, "is a binary file, text must be UTF-8", "give text")
    return pieces


def _of_folder(
    root: Path, found: Sequence[Path], config: TextConfig, left_out: LeftOut
) -> Iterator[Candidate]:
    """A document of each file; files that are a large share of the text are cut as a lone file is."""
    sizes = {}
    for path in Progress("looked at", total=len(found), unit="files").over(found):
        try:
            rows = _rows(root / path, path.as_posix(), config)
            if rows is not None:
                yield from rows
                continue
            sizes[path] = TextFile(root / path).num_bytes()
        except OSError as error:
            left_out.add(f"{NOT_READABLE}, {error.strerror or error}", path.as_posix())
    most = _all_bytes(sum(sizes.values()), config) // _LEAST_PIECES
    piece_bytes = _piece_bytes(sum(sizes.values()), config)
    for path, size in sizes.items():
        pieces = None
        if size > max(most, _LEAST_PIECE_BYTES):
            try:
                pieces = _pieces(root / path, path.as_posix(), piece_bytes, size)
            except OSError:
                pieces = None  # it is left out when it is read as a whole
        yield from pieces or _whole(root, [path])


def _all_bytes(num_bytes: int, config: TextConfig) -> int:
    """Of a corpus of so many bytes, those that will be used."""
    return num_bytes if config.max_bytes is None else min(num_bytes, config.max_bytes)


def _piece_bytes(num_bytes: int, config: TextConfig) -> int:
    share = _all_bytes(num_bytes, config) // _LEAST_PIECES
    return min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, share))


def _pieces(path: Path, name: str, piece_bytes: int, num_bytes: int) -> list[Candidate] | None:
    """A file of `num_bytes` as documents of about so many bytes, cut at line ends, so that it can be split; None: it is not text."""
    text = TextFile(path)()
    if text is None:
        return None
    size = max(piece_bytes * len(text) // max(num_bytes, 1), 1)  # in characters
    pieces: list[Candidate] = []
    start = first_byte = 0
    while start < len(text):
        end = start + size
        newline = text.find("\n", end, end + size)
        end = newline + 1 if newline >= 0 else end
        piece = text[start:end]
        last_byte = first_byte + len(piece.encode())
        # Packed files cannot be entered in the middle.
        read = partial(given, piece) if is_packed(path) else TextFile(path, first_byte, last_byte)
        pieces.append(Candidate(f"{name}#{len(pieces):06d}", read))
        start, first_byte = end, last_byte
    return pieces


def _dataset(name: str) -> list[Candidate]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            "data.dataset",
            name,
            "needs the package 'datasets'",
            "install it with: pip install datasets",
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # The library has many, plain Exception among them.
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            "data.dataset", name, f"cannot be loaded ({reason})", "check the name"
        ) from None
    if COLUMN not in rows.column_names:
        raise ConfigError(
            "data.dataset",
            name,
            f"needs a 'text' column, has {', '.join(rows.column_names)}",
            "choose another dataset",
        )
    return [Candidate(f"{i:012d}", partial(_row, rows, i)) for i in range(len(rows))]


def _row(rows: Any, index: int) -> str | None:
    return given(rows[index][COLUMN])


def _reader(read: Callable[[], str | None]) -> Callable[[], str]:
    def read_text() -> str:
        text = read()
        if text is None:
            raise ConfigError("data: a file changed while it was read; start again")
        return text

    return read_text


def _hash(purpose: str, name: str) -> int:
    """64 bits that depend on the purpose and the name only."""
    return int.from_bytes(
        hashlib.sha256(f"{purpose}:".encode() + os.fsencode(name)).digest()[:8], "big"
    )


def _option(config: TextConfig) -> str:
    if config.dataset is not None:
        return named("data.dataset", config.dataset)
    paths = (config.path,) if isinstance(config.path, str) else config.path or ("none",)
    return named("data.path", printable(" ".join(paths)))
