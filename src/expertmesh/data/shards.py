"""Token shards: the documents of a split as one memory-mapped array, encoded once and cached."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from expertmesh.config.base import cache_root, expanded, parse_json
from expertmesh.config.text import TextConfig
from expertmesh.config.tokens import TokensConfig
from expertmesh.data.cache_entry import INDEX, fill_once
from expertmesh.data.corpus import Corpus, Document, load_corpus, texts
from expertmesh.data.data_progress import Progress, note, say
from expertmesh.errors import ConfigError, named
from expertmesh.text.tokenizer import (
    end_of_text_id,
    given_tokenizer,
    named_end,
    save_tokenizer,
    train_tokenizer,
)

FORMAT_VERSION = 1
_BATCH_DOCUMENTS = 32


@dataclass(frozen=True)
class Shard:
    """The tokens of one split.

    Attributes:
        ends: (num_documents,) int64, memory-mapped, read only; tokens up to the end of each document. An end-of-text
            token may stand within one, too, where a given tokenizer finds it in a text.
    """

    # (N,) uint16 or uint32, memory-mapped, read only; every document ends with the end-of-text token
    tokens_N: np.ndarray
    ends: np.ndarray
    num_documents: int
    num_bytes: int  # bytes of their texts


@dataclass(frozen=True)
class TokenData:
    """Tokens of a corpus, with their tokenizer."""

    key: str  # hex digest of all inputs; the same key means the same tokens
    training: Shard
    validation: Shard
    tokenizer_path: Path  # the tokenizer, in the cache folder of the tokens
    corpus: Corpus  # the documents


def prepare_tokens(
    config: TextConfig, *, vocab_size: int, corpus: Corpus | None = None, tokens: TokensConfig | None = None
) -> TokenData:
    """Find the corpus, train the tokenizer and encode the documents, unless the cache has them."""
    corpus = load_corpus(config) if corpus is None else corpus
    identity = f"{FORMAT_VERSION}|{tokenizers.__version__}|{vocab_size}|{corpus.digest}"
    given: Tokenizer | None = None
    if config.encode_with is not None:
        given = given_tokenizer(expanded(config.encode_with), vocab_size=vocab_size, tokens=tokens)
        identity += f"|{given.to_str()}{named_end(given) or ''}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    folder = cache_root(config.cache_dir) / f"text-{key}"
    fill_once(folder, partial(_fill, corpus, given, vocab_size=vocab_size))
    index = parse_json((folder / INDEX).read_text())
    training, validation = (_open(folder, index, name) for name in ("training", "validation"))
    is_short = any(len(shard.tokens_N) <= config.seq_len for shard in (training, validation))
    for text in corpus.notes if corpus.num_skipped or not is_short else ():
        note(text)  # before the error: what is left out may be why the text is short
    for name, shard in (("training", training), ("validation", validation)):
        if len(shard.tokens_N) <= config.seq_len:
            raise ConfigError(
                "data.seq_len",
                config.seq_len,
                f"the {name} split has only {len(shard.tokens_N)} tokens",
                f"give more text or lower {named('data.seq_len')}",
            )
    return TokenData(key, training, validation, folder / "tokenizer.json", corpus)


def _open(folder: Path, index: dict[str, Any], name: str) -> Shard:
    """Map one split of a cache entry into memory."""
    entry = index[name]
    num_tokens, num_documents = entry["num_tokens"], entry["num_documents"]
    tokens_N = np.memmap(folder / f"{name}.bin", index["dtype"], mode="r", shape=(num_tokens,))
    ends = np.memmap(folder / f"{name}.ends", "<i8", mode="r", shape=(num_documents,))
    return Shard(tokens_N, ends, num_documents, entry["num_bytes"])


def _fill(corpus: Corpus, given: Tokenizer | None, folder: Path, *, vocab_size: int) -> None:
    """Write a cache entry: tokenizer, tokens and index."""
    tokenizer = given
    if tokenizer is None:
        # No text has more merges than bytes, and the trainer allocates memory for the requested number.
        most = 257 + sum(document.num_bytes for document in corpus.training)
        say(f"learning a tokenizer of {vocab_size:,} tokens")
        tokenizer = train_tokenizer(texts(corpus.training), vocab_size=min(vocab_size, most))
        say("")
    tokenizer = save_tokenizer(tokenizer, folder)  # encode with the saved tokenizer, as all later readers do
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    index: dict[str, object] = {"format_version": FORMAT_VERSION, "dtype": dtype}
    for name, documents in (("training", corpus.training), ("validation", corpus.validation)):
        ends = _write_tokens(folder / f"{name}.bin", documents, tokenizer, dtype)
        (folder / f"{name}.ends").write_bytes(np.array(ends, dtype="<i8").tobytes())
        index[name] = {
            "num_tokens": ends[-1],
            "num_documents": len(documents),
            "num_bytes": sum(document.num_bytes for document in documents),
        }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _write_tokens(path: Path, documents: Sequence[Document], tokenizer: Tokenizer, dtype: str) -> list[int]:
    """Write the tokens; returns the number of tokens up to the end of each document."""
    ends: list[int] = []
    num_tokens = 0
    end_id = end_of_text_id(tokenizer)
    batches = [documents[start : start + _BATCH_DOCUMENTS] for start in range(0, len(documents), _BATCH_DOCUMENTS)]
    progress = Progress("tokenised", total=sum(document.num_bytes for document in documents))
    with path.open("wb") as file:
        for batch in progress.over(batches, lambda batch: sum(d.num_bytes for d in batch)):
            found = [document.read() for document in batch]
            for encoding in tokenizer.encode_batch_fast(found, add_special_tokens=False):
                ids = np.array([*encoding.ids, end_id], dtype=dtype)
                file.write(ids.tobytes())
                num_tokens += len(ids)
                ends.append(num_tokens)
    return ends
