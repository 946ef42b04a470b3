"""The corpus of a run: its documents, selected and split into training and validation.

A document is a name and a function that reads its text. Only names, sizes and digests are kept in memory (and the text
of packed files that are cut), so a corpus may be larger than memory.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from expertmesh.config.text import TextConfig
from expertmesh.data.candidates import ENTRIES, Notices, find_documents, option_of
from expertmesh.data.data_progress import NAMES_ALL, Progress
from expertmesh.data.encoding import NotTextError, remedy
from expertmesh.data.files import NOT_READABLE
from expertmesh.data.pairs import prompt_of
from expertmesh.data.paths import find_paths
from expertmesh.data.plain_completions import check_plain
from expertmesh.data.records import PAIR, TALK, TEXT, Row
from expertmesh.errors import ConfigError, Line, named

# Ratio to the requested share beyond which a split gets a note.
_FAR = 3.0
_GIVE_TEXT = "; give text"


@dataclass(frozen=True)
class Document:
    """Name, size, digest and reader of a document."""

    name: str  # path relative to the corpus, with forward slashes; unique
    num_bytes: int  # length of the text in UTF-8
    digest: bytes  # SHA-256 of the text
    read: Callable[[], str] = field(compare=False)  # function that returns the text
    place: int = 0  # number of its entry of `data.path`; its name begins with it where there are several
    own_name: str = ""  # its name within that entry
    # digest of its prompt, where it is a pair of answers, whose prompts are on one side of the split
    prompt: bytes = b""

    @property
    def side_key(self) -> bytes:
        """Documents of the same are on one side of the split."""
        return self.prompt or self.digest


@dataclass(frozen=True)
class Corpus:
    """The documents of a run, split so that no validation text is trained on.

    Attributes:
        kind: what the documents are: texts, or, as JSON, conversations (`expertmesh.data.conversation_lines`) or pairs
            of answers.
    """

    source: str  # description of the corpus
    training: tuple[Document, ...]  # documents to train on, in order of a hash of their names
    validation: tuple[Document, ...]  # documents to evaluate on; none of them has the text of a training document
    num_skipped: int  # number of files, lines, ... left out: no text, not readable, no regular files.
    digest: str  # hex SHA-256 of all names and texts, in the order above, and of the split
    notes: tuple[Line, ...] = ()  # notes for the user, a line each: files left out, a split far from the requested one
    kind: str = TEXT

    @property
    def is_talk(self) -> bool:
        """Whether the documents are conversations."""
        return self.kind == TALK


def load_corpus(config: TextConfig) -> Corpus:
    """Find, select and split the documents. Reads every selected document once.

    Documents are ordered by a hash of their names. With `max_bytes`, the first documents are used until their texts
    have that many bytes. Documents of identical text go to the same side: the side of the smallest of their names.
    """
    notices = Notices()
    left_out = notices.left_out
    source, candidates = find_documents(config, notices)
    documents, num_bytes, left_unread, fix = [], 0, 0, _GIVE_TEXT
    kinds: dict[str, str] = {}
    not_talks: dict[str, str] = {}
    progress = Progress("read", total=config.max_bytes)
    ordered = sorted(candidates, key=lambda c: (_hash("order", c[0]), c[0]))
    for number, (name, read, place, own_name, shown) in enumerate(ordered):
        if config.max_bytes is not None and num_bytes >= config.max_bytes:
            left_unread = len(ordered) - number
            break
        try:
            data = read().encode()
        except OSError as error:
            left_out.add(f"{NOT_READABLE}, {error.strerror or error}", shown or name)
            continue
        except UnicodeEncodeError:  # JSON can have lone surrogates
            left_out.add("texts have half a character (a lone surrogate)", shown or name)
            continue
        except NotTextError as error:
            left_out.add(error.reason, shown or name)
            fix = remedy(error) if error.encoding else fix
            continue
        if not data:
            continue
        if config.completions == "text":
            check_plain(read, shown or name)
        if isinstance(read, Row) and read.shape is not None and read.shape.beside:
            not_talks.setdefault(" with ".join(map(repr, read.shape.beside)), shown or name)
        kind = read.kind if isinstance(read, Row) else TEXT
        kinds.setdefault(kind, shown or name)
        num_bytes += len(data)
        progress.at(num_bytes)
        where = place, own_name or name
        documents.append(_document(name, data, _reader(read), where, is_pair=kind == PAIR))
    progress.finish()
    if not documents:
        why = f"left out: {left_out}" if left_out.total else "it is empty"
        raise ConfigError(f"{option_of(config)}: has no text ({why}){fix} (docs/data.md says what is read)")
    if len(kinds) > 1:
        first, other = [kind for kind in (PAIR, TALK, TEXT) if kind in kinds][:2]
        raise ConfigError(
            f"{option_of(config)}: {kinds[first]} is a {first} and {kinds[other]} a {other}; train on one, then on the "
            f"other ({named('train.init_from')})"
        )
    training, validation = split_documents(documents, config.validation_fraction)
    if not training or not validation:
        different, same = len({d.side_key for d in documents}), len(documents) > 1
        without = "; give more text"
        if left_out.total:
            without = f" (left out: {left_out}){without if fix == _GIVE_TEXT else fix}"
        raise ConfigError(
            f"{option_of(config)}: {len(documents):,} document{'s' * same} with {different:,} different "
            f"text{'s' * (different > 1)} cannot be split into training and validation, which equal texts do not "
            f"cross{without}"
        )
    notes = _notes(training, validation, config, notices, not_talks)
    if left_unread and (config.path is not None or config.dataset is not None):
        notes.append(
            f"{option_of(config)}: only {num_bytes / 1e6:,.1f} MB are used and {left_unread:,} of {len(ordered):,} "
            f"pieces of text are not, by {named('data.max_bytes')}; for all of them: {named('data.max_bytes', 'none')}"
        )
    training = _weighted(training, config)
    if not training:
        raise ConfigError(
            f"{option_of(config)}: the weights leave no document to train on; raise them, or give more text"
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
        kind=next(iter(kinds)),
    )


def _document(name: str, data: bytes, read: Callable[[], str], where: tuple[int, str], *, is_pair: bool) -> Document:
    """A document with its size and digests; `where`: number of its entry of data.path, and its name within it."""
    digest = hashlib.sha256(data).digest()
    prompt = hashlib.sha256(prompt_of(data)).digest() if is_pair else b""
    return Document(name, len(data), digest, read, *where, prompt)


def _notes(
    training: list[Document],
    validation: list[Document],
    config: TextConfig,
    notices: Notices,
    not_talks: dict[str, str],
) -> list[str]:
    """Notes for the user on the texts; `not_talks` maps fields of conversations that stand beside a text to an
    example."""
    notes = _note_of_split(training, validation, config)
    if notices.left_out.total:
        notes.append(f"{option_of(config)}: left out: {notices.left_out}; {NAMES_ALL}")
    if notices.as_text.total:
        notes.append(
            f"{option_of(config)}: learned as they stand: {notices.as_text}; to read their texts, name the field: "
            f"{named('data.column', 'NAME')}"
        )
    for fields, where in not_talks.items():
        notes.append(
            f"{option_of(config)}: the 'text' of records is learned whole, and they have {fields}, too (for example "
            f"{where}); to learn"
            f" answers alone, take 'text' out of the records; else say so: {named('data.column', 'text')}"
        )
    if notices.unnamed.total:
        ending = ".json, or .jsonl for objects on lines" if ENTRIES in notices.unnamed.counts else ".jsonl"
        notes.append(
            f"{option_of(config)}: learned as they stand: {notices.unnamed}; to read their texts, end the names in "
            f"{ending}"
        )
    return notes


def _note_of_split(training: Sequence[Document], validation: Sequence[Document], config: TextConfig) -> list[str]:
    """A note if the split is far from the requested one, because documents stay whole; else empty."""
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
        f"{option_of(config)}: {share:.1%} of the text is for validation, not the {wanted:.1%} of "
        f"{named('data.validation_fraction')}: documents stay whole, and there are {len(training) + len(validation)}; "
        "give more, or another fraction"
    )
    return [note]


def split_documents(documents: Sequence[Document], validation_fraction: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, in the given order; equal texts are on one side.

    The side depends only on a document's name in its entry of `data.path`, so a document stays on its side when other
    files come or go, and when entries are added behind its own. Of a text that occurs several times, the smallest name
    in the first entry counts. If chance leaves a side empty, the text whose name is nearest to the border changes
    sides.

    Returns:
        Training and validation documents. A side is empty only if there are fewer than two different texts.
    """
    owner: dict[bytes, tuple[int, str]] = {}
    for document in documents:
        mine = (document.place, document.own_name or document.name)
        key = document.side_key
        owner[key] = min(mine, owner.get(key, mine))
    place = {digest: _hash("split", name) / 2**64 for digest, (_, name) in owner.items()}
    border = validation_fraction
    if len(place) > 1:
        places = sorted(place.values())
        # Strictly between the first and the last, so that no side is empty.
        border = min(max(border, places[0] * (1 + 1e-12) + 1e-18), places[-1])
    training = [d for d in documents if place[d.side_key] >= border]
    validation = [d for d in documents if place[d.side_key] < border]
    return training, validation


def texts(documents: Sequence[Document]) -> Iterator[str]:
    """The texts of documents, read one after the other."""
    for document in documents:
        yield document.read()


def _weighted(training: Sequence[Document], config: TextConfig) -> list[Document]:
    """Training documents repeated by the weights of their entries of `data.path`; a fraction of a weight by a hash of
    the name."""
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


def _reader(read: Callable[[], str]) -> Callable[[], str]:
    def read_text() -> str:
        try:
            return read()
        except NotTextError:
            raise ConfigError("data: a file changed while it was read; start again") from None

    return read_text


def _hash(purpose: str, name: str) -> int:
    """64 bits that depend on the purpose and the name only."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:".encode() + os.fsencode(name)).digest()[:8], "big")
