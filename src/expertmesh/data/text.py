"""Text as the data of a language model's run: windows of tokens, and bytes of text per validation token."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.config.base import expanded
from expertmesh.config.text import TextConfig
from expertmesh.config.tokens import TokensConfig
from expertmesh.data.candidates import option_of
from expertmesh.data.conversations import ConversationData
from expertmesh.data.corpus import Corpus, load_corpus
from expertmesh.data.labels import labels_to_record
from expertmesh.data.order import shuffled
from expertmesh.data.pair_data import PairData
from expertmesh.data.paths import distinct, find_paths
from expertmesh.data.records import PAIR, TALK, TEXT
from expertmesh.data.shards import prepare_tokens
from expertmesh.data.windows import Windows
from expertmesh.errors import ConfigError, named
from expertmesh.text.format import extras_of
from expertmesh.text.tokenizer import end_of_text_id, load_tokenizer, token_num_bytes


def text_data(
    config: TextConfig,
    *,
    vocab_size: int,
    seed: int,
    objective: str = "auto",
    tokens: TokensConfig | None = None,
) -> "TextData | ConversationData":
    """The data of a run from its corpus: text in windows, conversations in rows, or pairs of answers."""
    corpus = load_corpus(config)
    _check_objective(corpus, config, objective)
    how: dict[str, Any] = {"vocab_size": vocab_size, "seed": seed, "tokens": tokens}
    if corpus.kind == PAIR:
        return PairData(corpus, config, **how)
    if corpus.kind == TALK:
        return ConversationData(corpus, config, **how)
    if config.pack:
        raise ConfigError(
            "data.pack",
            True,
            "packs conversations, and text fills its rows in any case",
            "leave it out",
        )
    return TextData(config, corpus=corpus, **how)


_LEARNED = {"auto": (TEXT, TALK), "lm": (TEXT,), "sft": (TALK,), "dpo": (PAIR,)}
"""Kinds of documents that each objective learns from."""


def _check_objective(corpus: Corpus, config: TextConfig, objective: str) -> None:
    """Raise ConfigError if the objective does not learn from the documents of a corpus."""
    wanted = _LEARNED[objective]
    if corpus.kind in wanted:
        return
    other = next(one for one, kinds in _LEARNED.items() if one != "auto" and corpus.kind in kinds)
    if objective == "auto":
        raise ConfigError(
            f"{option_of(config)}: its first record is a {corpus.kind}; to learn preferences give "
            f"{named('objective.name', other)}, to learn the right answers alone {named('objective.name', 'sft')} and "
            f"{named('data.column', 'chosen')}"
        )
    raise ConfigError(
        "objective.name",
        objective,
        f"learns from a {' or '.join(wanted)} each, and a record of {option_of(config)} is a {corpus.kind}",
        f"use {named('objective.name', other)}, or other data",
    )


class TextData:
    """Tokens of a corpus in windows of S; finds the corpus, and fills the cache unless it has the tokens."""

    def __init__(
        self,
        config: TextConfig,
        *,
        vocab_size: int,
        seed: int,
        corpus: Corpus | None = None,
        tokens: TokensConfig | None = None,
    ) -> None:
        found = prepare_tokens(config, vocab_size=vocab_size, corpus=corpus, tokens=tokens)
        self.key, self.corpus = found.key, found.corpus
        given = None if config.encode_with is None else expanded(config.encode_with)
        self.files = {"tokenizer.json": found.tokenizer_path, **extras_of(given)}
        self.windows = Windows(found.training.tokens_N, config.seq_len, seed)  # windows of the training split
        self._validation = Windows(found.validation.tokens_N, config.seq_len, seed)
        self.num_training = self.windows.num_windows  # number of training samples
        self.num_validation = self._validation.num_windows  # number of validation samples
        tokenizer = load_tokenizer(found.tokenizer_path)
        sizes = token_num_bytes(tokenizer, vocab_size)
        self._num_bytes_V = torch.from_numpy(sizes)
        self._end_id = end_of_text_id(tokenizer)
        self._has_documents = config.document_mask
        self.labels = _entries(config)  # names of the entries of `data.path`, all different, if there are 2 to 64
        self._ends = found.training.ends
        self._label_of_document = np.array([d.place for d in self.corpus.training], dtype=np.int64)
        self.description = (
            f"{self.corpus.source}: {len(found.training.tokens_N):,} training and "
            f"{len(found.validation.tokens_N):,} validation tokens"
        )

    def batch(self, first_sample: int, num_samples: int) -> tuple[Any, ...]:
        """Inputs and targets, each (num_samples, S) int64.

        With a document mask or several entries of `data.path`, a third entry: {"document": (num_samples, S), number of
        each input's document; "label": (num_samples,), number of the entry of the document in which a window begins},
        both int64.
        """
        total, seed = self.windows.num_windows, self.windows.seed
        which = shuffled(first_sample, num_samples, total=total, seed=seed)
        ids_BS, targets_BS = self.windows.windows(which)
        more = self._documents(ids_BS)
        if self.labels:
            starts = np.array(which) * self.windows.seq_len
            document = np.searchsorted(self._ends, starts, side="right")
            more["label"] = torch.from_numpy(self._label_of_document[document])
        return (ids_BS, targets_BS, more) if more else (ids_BS, targets_BS)

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[tuple[Any, ...]]:
        """Batches of inputs, targets, and bytes of text of each target, (B, S) int64; with a document mask,
        {"document": (B, S)}, too."""
        for ids_BS, targets_BS in self._validation.batches(max_samples, batch_size):
            found = ids_BS, targets_BS, self._num_bytes_V[targets_BS]
            more = self._documents(ids_BS)
            yield (*found, more) if more else found

    def _documents(self, ids_BS: Tensor) -> dict[str, Tensor]:
        """Number of each input's document: end-of-text tokens so far. A document begins with the end of the one
        before."""
        return {"document": (ids_BS == self._end_id).cumsum(1)} if self._has_documents else {}


def _entries(config: TextConfig) -> tuple[str, ...]:
    """Labels of the entries of `data.path`; empty unless `labels_to_record` keeps them."""
    if config.path is None or config.dataset is not None:
        return ()
    names = distinct(place.name for place in find_paths(config.path))
    return labels_to_record(names, "entries of data.path")
