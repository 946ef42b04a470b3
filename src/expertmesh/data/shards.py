"""Token shards: all documents of a split as one memory-mapped array, prepared once and cached."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from expertmesh.config.base import cache_root, expanded, parse_json
from expertmesh.config.output_file import naming
from expertmesh.config.text import TextConfig
from expertmesh.data.cache_entry import exclusive, make_cache, remove_leftovers, sha256_of
from expertmesh.data.corpus import Corpus, Document, load_corpus, texts
from expertmesh.data.news import Progress, say
from expertmesh.data.tokenizer import (
    end_of_text_id,
    given_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from expertmesh.errors import ConfigError

FORMAT_VERSION = 1
_BATCH_DOCUMENTS = 32
_SPLITS = ("training", "validation")
_FILES = ("tokenizer.json", "training.bin", "validation.bin", "training.ends", "validation.ends")
_END_BYTES = 8

_log = logging.getLogger("expertmesh.data")


@dataclass(frozen=True)
class Shard:
    """The tokens of one split.

    Attributes:
        tokens_N: (N,) uint16 or uint32, memory-mapped, read only; every document ends with the end-of-text token.
        ends: (num_documents,) int64, memory-mapped, read only; tokens up to the end of each document. An end-of-text token may stand
            within one, too, where a given tokenizer finds it in a text.
        num_documents: documents in it.
        num_bytes: bytes of their texts.
    """

    tokens_N: np.ndarray
    ends: np.ndarray
    num_documents: int
    num_bytes: int


@dataclass(frozen=True)
class TokenData:
    """Everything that training reads.

    Attributes:
        folder: where it is cached.
        key: hex digest of all that it depends on; the same key means the same tokens.
        source: what the corpus is, in words.
        training: tokens to train on.
        validation: tokens to evaluate on.
        tokenizer_path: the tokenizer.
        corpus: the documents themselves.
    """

    folder: Path
    key: str
    source: str
    training: Shard
    validation: Shard
    tokenizer_path: Path
    corpus: Corpus


def prepare_tokens(
    config: TextConfig, *, vocab_size: int, corpus: Corpus | None = None
) -> TokenData:
    """Find the corpus, and train the tokenizer and encode the documents unless the cache has them.

    Any number of processes may call this at once: one prepares, the others wait for it. The cache entry appears by one
    rename, so a process killed half-way leaves no half entry. Checksums are compared in each call, and a damaged entry is
    made anew.

    Args:
        config: of the data.
        vocab_size: V of the model.
        corpus: of `load_corpus`, where it is there already.

    Returns:
        The tokens.

    Raises:
        ConfigError: the corpus is missing, not text, or shorter than one sequence on a side.
        OSError: the cache cannot be written.
    """
    corpus = load_corpus(config) if corpus is None else corpus
    identity = f"{FORMAT_VERSION}|{tokenizers.__version__}|{vocab_size}|{corpus.digest}"
    given: Tokenizer | None = None
    if config.encode_with is not None:
        given = given_tokenizer(expanded(config.encode_with), vocab_size=vocab_size)
        identity += f"|{given.to_str()}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    base = cache_root(config.cache_dir)
    folder = base / f"tokens-{key}"
    if damage_of_cache(folder) is not None:
        make_cache(base)
        with naming(folder), exclusive(base / f"tokens-{key}.lock"):
            damage = damage_of_cache(folder)
            if damage is not None:
                if folder.exists():
                    _log.warning("token cache %s: %s; it is made anew", folder, damage)
                remove_leftovers(base, mine=folder.name)
                _build(corpus, folder, given, vocab_size=vocab_size)
    training, validation = (open_shard(folder, name) for name in _SPLITS)
    for name, shard in (("training", training), ("validation", validation)):
        if len(shard.tokens_N) <= config.seq_len:
            raise ConfigError(
                f"data.seq_len={config.seq_len}: the {name} split has only {len(shard.tokens_N)} tokens; "
                "give more text or lower data.seq_len"
            )
    for note in corpus.notes:
        _log.warning(note)
    return TokenData(
        folder, key, corpus.source, training, validation, folder / "tokenizer.json", corpus
    )


def damage_of_cache(folder: Path) -> str | None:
    """What is wrong with a cache entry, or None; reads all of it. Those of old have no checksums, only sizes, or no ends of documents."""
    try:
        index = parse_json((folder / "index.json").read_bytes())
        width = np.dtype(index["dtype"]).itemsize
        sizes = {f"{name}.bin": index[name]["num_tokens"] * width for name in _SPLITS}
        sizes |= {f"{name}.ends": index[name]["num_documents"] * _END_BYTES for name in _SPLITS}
        checksums = index.get("sha256", {})
        for name in _FILES:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != sizes.get(name, size):
                    return f"{name} has {size} bytes, not {sizes[name]}"
                if name in checksums and sha256_of(file) != checksums[name]:
                    return f"{name} has another checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "index.json is unreadable"
    return None


def open_shard(folder: Path, name: str) -> Shard:
    """Map one split of a cache entry into memory.

    Args:
        folder: the cache entry.
        name: "training" or "validation".
    """
    index = parse_json((folder / "index.json").read_text())
    entry = index[name]
    tokens = np.memmap(
        folder / f"{name}.bin", dtype=index["dtype"], mode="r", shape=(entry["num_tokens"],)
    )
    ends = np.memmap(
        folder / f"{name}.ends", dtype="<i8", mode="r", shape=(entry["num_documents"],)
    )
    return Shard(tokens, ends, entry["num_documents"], entry["num_bytes"])


def _build(corpus: Corpus, folder: Path, given: Tokenizer | None, *, vocab_size: int) -> None:
    """Write a cache entry beside its place, then rename it."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        tokenizer = given
        if tokenizer is None:
            # No text has more merges than bytes, and the trainer sets memory aside for all that it is told of.
            most = 257 + sum(document.num_bytes for document in corpus.training)
            say(f"learning a tokenizer of {vocab_size:,} tokens")
            tokenizer = train_tokenizer(texts(corpus.training), vocab_size=min(vocab_size, most))
            say("")
        (partial / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        # Encode with what was saved, which is what everybody will use.
        tokenizer = load_tokenizer(partial / "tokenizer.json")
        dtype = "<u2" if vocab_size <= 2**16 else "<u4"
        index: dict[str, object] = {"format_version": FORMAT_VERSION, "dtype": dtype}
        for name, documents in (("training", corpus.training), ("validation", corpus.validation)):
            ends = _write_tokens(partial / f"{name}.bin", documents, tokenizer, dtype)
            (partial / f"{name}.ends").write_bytes(np.array(ends, dtype="<i8").tobytes())
            index[name] = {
                "num_tokens": ends[-1],
                "num_documents": len(documents),
                "num_bytes": sum(document.num_bytes for document in documents),
            }
        checksums = {}
        for name in _FILES:
            with (partial / name).open("rb") as file:
                checksums[name] = sha256_of(file)
        index["sha256"] = checksums
        (partial / "index.json").write_text(json.dumps(index, indent=1))
        if folder.exists():
            shutil.rmtree(folder)  # It is damaged.
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokens(
    path: Path, documents: Sequence[Document], tokenizer: Tokenizer, dtype: str
) -> list[int]:
    """Write the tokens; returns how many there are up to the end of each document."""
    ends: list[int] = []
    num_tokens = num_bytes = 0
    end_id = end_of_text_id(tokenizer)
    progress = Progress("tokenised", total=sum(document.num_bytes for document in documents))
    with path.open("wb") as file:
        for start in range(0, len(documents), _BATCH_DOCUMENTS):
            batch = [document.read() for document in documents[start : start + _BATCH_DOCUMENTS]]
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array([*encoding.ids, end_id], dtype=dtype)
                file.write(ids.tobytes())
                num_tokens += len(ids)
                ends.append(num_tokens)
            num_bytes += sum(d.num_bytes for d in documents[start : start + _BATCH_DOCUMENTS])
            progress.at(num_bytes)
        file.flush()
        os.fsync(file.fileno())
    progress.finish()
    return ends
