"""Parallel text: files SPLIT.LANG (.gz, .zst) with corresponding lines, tokenised with a shared vocabulary and
cached."""

import hashlib
import heapq
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from expertmesh.config.base import cache_root, expanded, nearest_name, parse_json, user_cache_dir
from expertmesh.data.cache_entry import INDEX, fill_once
from expertmesh.data.data_progress import NAMES_ALL, note
from expertmesh.data.encoding import (
    MOST_OF_A_MARK,
    NotTextError,
    decoded,
    encoding_of,
    remedy,
)
from expertmesh.data.files import LeftOut, is_packed, lines_of, opened
from expertmesh.data.order import permutation
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh.text.tokenizer import END_OF_TEXT_ID, load_tokenizer, train_tokenizer
from expertmesh_families.seq2seq.config import LANGUAGE, ParallelTextConfig

FORMAT_VERSION = 1
MASK_ID = 1
"""Id of the token that replaces a masked span, in every tokenizer trained here."""
_MASK = "<|mask|>"
_SPLIT_NAMES = ("training", "validation")
_OTHER_ENDINGS = frozenset({"txt", "bak", "old", "tmp", "csv", "tsv", "log", "md", "gz", "xz", "zip", "tar", "zst"})
"""Endings that look like language codes but rarely are; data.languages can name one that is (bak, Bashkir)."""
_BLANKS = re.compile(rb"\n(?:[ \t\f\v]|\xc2\xa0|\xe3\x80\x80)+(?=\r?\n)")
"""Lines with only blanks, no-break spaces (U+00A0) and ideographic spaces (U+3000) included."""
_NO_LANGUAGE = "files have endings that are no languages as en, zh_Hans"


@dataclass(frozen=True)
class Lines:
    """Tokenised lines of one file in one language."""

    tokens_N: np.ndarray  # concatenated tokens of all lines
    starts: np.ndarray  # (lines + 1,) offset of each line in tokens_N; a blank line has no tokens

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each line, (lines,)."""
        return np.diff(self.starts)

    def line(self, index: int) -> np.ndarray:
        """The tokens of a line."""
        return self.tokens_N[self.starts[index] : self.starts[index + 1]]


Corpus = dict[str, Lines]
"""Lines of one folder's split by language; all languages have the same number of lines."""


@dataclass(frozen=True)
class ParallelTokens:
    """Tokenised parallel text."""

    key: str  # hex digest of everything that the tokens depend on
    languages: tuple[str, ...]  # languages with a tag, which can be targets, in the order of the tags
    texts: tuple[str, ...]  # languages of the files; those without a tag are sources only
    training: tuple[Corpus, ...]  # a corpus per folder
    validation: tuple[Corpus, ...]  # a corpus per folder that has this split
    tokenizer_path: Path  # tokenizer.json of the vocabulary that all languages share


def tag(language: str) -> str:
    """Token that selects a target language."""
    return f"<|{language}|>"


def tag_id(languages: Sequence[str], language: str) -> int:
    """Id of a language's tag; tags follow the end of text and the mask."""
    if language not in languages:
        near = nearest_name(language, list(languages))
        hint = f"did you mean {near}?" if near else f"known here: {', '.join(languages)}"
        raise ConfigError(f"language {language}: unknown; {hint}")
    return MASK_ID + 1 + languages.index(language)


def languages_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The languages of a tokenizer trained here, in the order of their tags."""
    marks = tokenizer.get_added_tokens_decoder()
    return tuple(marks[i].content[2:-2] for i in sorted(marks) if i > MASK_ID)


def find_folder(name: str) -> Path:
    """A folder by its path, or by its name below data/, ../shared/data/ or the user's cache folder."""
    path = expanded(name)
    places = [path]
    if len(path.parts) == 1:
        places += [Path("data") / name, Path("../shared/data") / name, user_cache_dir() / name]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(
        "data.path",
        name,
        f"there is no such folder ({', '.join(map(str, places))})",
        "give one with files like train.en and train.de",
    )


def prepare_parallel(config: ParallelTextConfig, *, vocab_size: int) -> ParallelTokens:
    """Read the files, train the tokenizer and encode the lines; tokenizer and tokens are taken from the cache if it has
    them."""
    if not config.path:
        raise ConfigError(
            "data.path",
            "none",
            "translation needs parallel text",
            "give a folder with files like train.en and train.de",
        )
    folders = [find_folder(name) for name in config.path]
    left_out = LeftOut()
    files = [_files(folder, config.train_split, config.languages, left_out) for folder in folders]
    if left_out.total:
        path = named("data.path", " ".join(config.path))
        note(f"{path}: left out: {left_out}; {NAMES_ALL}")
    languages = config.languages or tuple(sorted({code for found in files for code in found}))
    for code in languages:
        if not any(code in found for found in files):
            known = ", ".join(sorted({code for found in files for code in found})) or "none"
            raise ConfigError(
                "data.languages",
                code,
                f"no folder of {named('data.path')} has {config.train_split}.{code}",
                f"known there: {known}",
            )
    given = None if config.encode_with is None else _given(config.encode_with, vocab_size)
    if len(config.languages) == 1:
        raise ConfigError(
            "data.languages",
            config.languages[0],
            "is one language, and translation needs two",
            "name another, or leave the option out",
        )
    if len(languages) < 2:
        raise ConfigError(
            "data.path",
            " ".join(config.path),
            f"has {config.train_split} files of {len(languages)} languages",
            "translation needs two or more",
        )
    for name, found in zip(config.path, files, strict=True):
        if not found:
            raise ConfigError(
                "data.path",
                name,
                f"has no {config.train_split} file of {', '.join(languages)}",
                "leave the folder out, or add some",
            )
    others = [_files(folder, config.validation_split, languages, left_out) for folder in folders]
    splits = {"training": files, "validation": [found for found in others if len(found) > 1]}
    if not splits["validation"]:
        raise ConfigError(
            "data.validation_split",
            config.validation_split,
            f"no folder of {named('data.path')} has its files in two languages",
            "add them, or name another split",
        )
    marks = languages if given is None else languages_of(load_tokenizer(given))
    digest = hashlib.sha256(f"{FORMAT_VERSION}|{tokenizers.__version__}|{vocab_size}|{marks}".encode())
    if given is not None:
        digest.update(given.read_bytes())
    elif len(folders) > 1:
        digest.update(b"|all folders in turn")  # an earlier version read folders one after another
    for name in _SPLIT_NAMES:
        for found in splits[name]:
            digest.update(f"|{name} {sorted(found)}".encode())
            for code in sorted(found):
                digest.update(hashlib.sha256(_bytes(found[code], config.encoding)).digest())
    key = digest.hexdigest()[:24]
    base = cache_root(config.cache_dir)
    folder = base / f"parallel-{key}"
    fill_once(
        folder,
        partial(_build, splits, marks, given, encoding=config.encoding, vocab_size=vocab_size),
    )
    training, validation = (_open(folder, name) for name in _SPLIT_NAMES)
    return ParallelTokens(key, marks, languages, training, validation, folder / "tokenizer.json")


def _given(name: str, vocab_size: int) -> Path:
    """Path of a given tokenizer, checked to be one with language tags."""
    path = expanded(name)
    if not path.is_file():
        raise ConfigError("data.encode_with", name, "is no file", "name the tokenizer.json of a run")
    try:
        tokenizer = load_tokenizer(path, vocab_size=vocab_size)
    except CheckpointError as error:
        raise ConfigError(named("data.encode_with", error)) from None
    if not languages_of(tokenizer):
        raise ConfigError(
            "data.encode_with",
            name,
            "has no tags of languages",
            "name that of a run that translates",
        )
    return path


def read_lines(path: Path) -> list[str]:
    """Lines of a text file, compressed or not, without line ends; UTF-8, or the encoding of its byte-order mark."""
    return lines_of(decoded(_bytes(path, None, option="")))


def _bytes(path: Path, encoding: str | None, option: str = "data.encoding") -> bytes:
    """Bytes of a text file, decompressed and in UTF-8; lines with only blanks become empty and are not translated."""
    try:
        with opened(path) as file:
            data = file.read()
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConfigError(f"{path}: is damaged, or was not packed as its name says; restore it from a copy") from None
    try:
        text = decoded(data, encoding)
    except NotTextError as error:
        raise ConfigError(f"{path}: {error}{remedy(error, option)}") from None
    if encoding_of(data[:MOST_OF_A_MARK], encoding)[0] != "utf-8":
        data = text.encode()
    return _BLANKS.sub(b"\n", b"\n" + data)[1:]


def _files(folder: Path, split: str, languages: Sequence[str], left_out: LeftOut) -> dict[str, Path]:
    """Files of a split by language, restricted to the given languages if there are any."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{split}.*")):
        ending = path.suffix if is_packed(path) else ""
        code = path.name.removeprefix(f"{split}.").removesuffix(ending)
        if not path.is_file():
            continue
        is_language = LANGUAGE.fullmatch(code) is not None and code not in _OTHER_ENDINGS
        if code in languages or (not languages and is_language):
            if code in found:
                raise ConfigError(
                    f"{path}: there is {found[code].name} beside it, for the same language; remove one of the two"
                )
            found[code] = path
        elif not languages:
            left_out.add(_NO_LANGUAGE, path.name)
    return found


def _texts(files: dict[str, Path], encoding: str | None) -> dict[str, list[str]]:
    texts = {code: lines_of(decoded(_bytes(path, encoding))) for code, path in files.items()}
    first = next(iter(texts))
    for code, lines in texts.items():
        if len(lines) != len(texts[first]):
            raise ConfigError(
                f"{files[code]}: has {len(lines):,} lines and {files[first].name} has {len(texts[first]):,}; parallel "
                "files have equally many, blank where a line is not translated"
            )
    return texts


def in_turn(corpora: Sequence[Mapping[str, Sequence[str]]]) -> Iterator[str]:
    """Lines of all folders and languages, interleaved in a random order, so that the first ones represent all."""

    def shuffled(number: int, count: int) -> Iterator[tuple[float, int, int]]:
        for place, line in enumerate(permutation(count, 0, 0)):
            yield (place + 0.5) / count, number, int(line)

    counts = [len(next(iter(texts.values()))) for texts in corpora]
    for _, number, line in heapq.merge(*map(shuffled, range(len(counts)), counts)):
        yield from (lines[line] for lines in corpora[number].values())


def _build(
    splits: dict[str, list[dict[str, Path]]],
    languages: Sequence[str],
    given: Path | None,
    folder: Path,
    *,
    encoding: str | None,
    vocab_size: int,
) -> None:
    texts = {name: [_texts(files, encoding) for files in splits[name]] for name in _SPLIT_NAMES}
    if given is None:
        marks = [_MASK, *map(tag, languages)]
        learned = train_tokenizer(in_turn(texts["training"]), vocab_size=vocab_size, marks=marks)
        learned.save(str(folder / "tokenizer.json"))
    else:
        shutil.copyfile(given, folder / "tokenizer.json")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            "model.vocab_size",
            vocab_size,
            f"is too small for 256 bytes and the marks of {len(languages)} languages",
            f"raise it to {tokenizer.get_vocab_size()} or more",
        )
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    for name, corpora in texts.items():
        for index, corpus in enumerate(corpora):
            for code, lines in corpus.items():
                encoded = tokenizer.encode_batch_fast(lines, add_special_tokens=False)
                ids = [encoding.ids for encoding in encoded]
                starts = np.cumsum([0, *map(len, ids)])
                flat = np.fromiter((i for line in ids for i in line), dtype, count=starts[-1])
                np.save(folder / f"{name}.{index}.{code}.tokens.npy", flat)
                np.save(folder / f"{name}.{index}.{code}.starts.npy", starts.astype(np.int64))
    index_values = {
        "format_version": FORMAT_VERSION,
        "languages": list(languages),
        **{name: [sorted(corpus) for corpus in texts[name]] for name in _SPLIT_NAMES},
    }
    (folder / INDEX).write_text(json.dumps(index_values, indent=1))


def _open(folder: Path, name: str) -> tuple[Corpus, ...]:
    found = parse_json((folder / INDEX).read_text())[name]
    corpora = []
    for index, codes in enumerate(found):
        corpus = {}
        for code in codes:
            parts = (
                np.load(folder / f"{name}.{index}.{code}.{part}.npy", mmap_mode="r") for part in ("tokens", "starts")
            )
            corpus[code] = Lines(*parts)
        corpora.append(corpus)
    return tuple(corpora)


def source_ids(tokens: Sequence[int], *, tag: int) -> list[int]:
    """Input of the encoder: the tag of the target language, the text, the end of text."""
    return [tag, *tokens, END_OF_TEXT_ID]
