"""Conversations as the data of a run: one or several packed per row, with a loss on the assistant's tokens only."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.config.base import cache_root, expanded, parse_json
from expertmesh.config.text import TextConfig
from expertmesh.config.tokens import TokensConfig
from expertmesh.data.cache_entry import INDEX, fill_once
from expertmesh.data.corpus import Corpus, Document
from expertmesh.data.data_progress import Progress, note, say
from expertmesh.data.files import LeftOut
from expertmesh.data.order import permutation, shuffled, spread_batches
from expertmesh.data.packing import packed
from expertmesh.data.pairs import SIDES
from expertmesh.data.plain_completions import PlainForm
from expertmesh.data.records import PAIR, TALK
from expertmesh.errors import ConfigError, Line, named
from expertmesh.text.chat import (
    MARKS,
    MESSAGES,
    ChatFormat,
    Conversation,
    TokenSpan,
    is_answer,
    is_learned,
)
from expertmesh.text.format import files_of_format, find_format
from expertmesh.text.tokenizer import (
    given_tokenizer,
    load_tokenizer,
    named_end,
    save_tokenizer,
    token_num_bytes,
    train_tokenizer,
)

_SIDES = ("training", "validation")
_PLURALS = {TALK: "conversations", PAIR: "pairs of answers"}
_NO_ANSWER = "have no turn of the assistant that says something"
_CUT_AWAY = "have no turn of the assistant in their first tokens"
_CUT = "are cut"
_EMPTY = "have an empty turn of the assistant, which is not learned"
_NOT_LEARNED = "have no turn of the assistant that is to be learned, by their flags"
_THOUGHTS = "have thoughts, which the chat format does not write"
_NO_END = "have an answer that ends in a token at which generation does not stop"
_SAID = (_CUT, _EMPTY, _THOUGHTS, _NO_END)
"""Notes on conversations that are learned all the same."""
_FIELDS_OF_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


Rows = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Inputs and targets, (B, S) int64, 0 where padded; and {"counts": (B, S) bool, whether a target is the assistant's;
"is_token": (B, S) bool, whether an input is no padding; and where rows are packed, "document": (B, S) int64, number of
an input's conversation in its row, from 1, 0 where padded}."""


@dataclass(frozen=True)
class _SplitSequences:
    """The sequences of one split, memory-mapped.

    A sample is `per_sample` neighbouring sequences, each in a row of its own, or the samples of an entry of `packs`,
    row by row.
    """

    tokens_N: np.ndarray
    learned_N: np.ndarray
    starts: np.ndarray
    per_sample: int = 1
    packs: list[list[int]] | None = None

    def packed(self, seq_len: int, seed: int) -> "_SplitSequences":
        """A copy with samples packed into rows of at most seq_len tokens."""
        lengths = np.diff(self.starts) - 1  # the last token of each is predicted only
        lengths = lengths.reshape(-1, self.per_sample).max(1)
        order = permutation(len(lengths), seed, 0).tolist()
        return replace(self, packs=packed(lengths.tolist(), seq_len, order))

    def rows(self, which: Sequence[int], seq_len: int) -> Rows:
        shape = len(which) * self.per_sample, seq_len
        ids, targets, document = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        counts = torch.zeros(shape, dtype=torch.bool)
        for row, (chosen, place) in enumerate(product(which, range(self.per_sample))):
            first = 0
            for number, sample in enumerate(self.members(chosen), 1):
                i = sample * self.per_sample + place
                start, stop = int(self.starts[i]), int(self.starts[i + 1])
                tokens = torch.from_numpy(self.tokens_N[start:stop].astype(np.int64))
                at = slice(first, first + stop - start - 1)
                ids[row, at], targets[row, at], document[row, at] = tokens[:-1], tokens[1:], number
                counts[row, at] = torch.from_numpy(self.learned_N[start + 1 : stop] != 0)
                first = at.stop
        more = {"counts": counts, "is_token": document > 0}
        return ids, targets, more if self.packs is None else {**more, "document": document}

    def members(self, chosen: int) -> list[int]:
        """Samples of the files in a sample, of which there are several where they are packed."""
        return [chosen] if self.packs is None else self.packs[chosen]

    @property
    def most_members(self) -> int:
        """Largest number of members of a sample."""
        return 1 if self.packs is None else max(map(len, self.packs))

    def __len__(self) -> int:
        num_samples = (len(self.starts) - 1) // self.per_sample
        return num_samples if self.packs is None else len(self.packs)


class ConversationData:
    """Conversations of a corpus, one (or one turn of the assistant) in each row; fills the cache unless it has them."""

    version: ClassVar[tuple[int | str, ...]] = (3,)
    """Version of the rows, which is part of the key."""
    per_sample: ClassVar[int] = 1
    """Sequences of a sample."""

    def __init__(
        self,
        corpus: Corpus,
        config: TextConfig,
        *,
        vocab_size: int,
        seed: int,
        tokens: TokensConfig | None = None,
    ) -> None:
        given = None if config.encode_with is None else expanded(config.encode_with)
        least = 257 + len(MARKS)
        if given is None and vocab_size < least:
            raise ConfigError(
                "model.vocab_size",
                vocab_size,
                f"conversations need at least {least}, the 256 bytes, the end of a message and the marks of the roles",
                "raise it",
            )
        if config.document_mask:
            raise ConfigError(
                "data.document_mask",
                True,
                f"conversations never look at one another, in packed rows ({named('data.pack')}) neither",
                "leave it out",
            )
        tokenizer = None if given is None else given_tokenizer(given, vocab_size=vocab_size, tokens=tokens)
        form = None
        is_plain = config.completions == "text"
        versions = [*self.version, tokenizers.__version__]
        identity = [*versions, vocab_size, config.seq_len, corpus.digest]
        if tokenizer is not None:
            form = _form(tokenizer, given, is_plain=is_plain)
            identity += [tokenizer.to_str(), form.identity]
            identity += filter(None, [named_end(tokenizer)])
        elif is_plain:
            identity += [PlainForm.identity]
        self.key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
        self._seq_len, self._seed = config.seq_len, seed
        folder = cache_root(config.cache_dir) / f"conversations-{self.key}"
        fill_once(
            folder,
            lambda at: _fill(
                at,
                corpus,
                tokenizer,
                given,
                vocab_size=vocab_size,
                seq_len=config.seq_len,
                is_plain=is_plain,
                rows_of=self.rows_of,
            ),
        )
        index = parse_json((folder / INDEX).read_bytes())
        for text in [*corpus.notes, *map(Line, index["notes"])]:
            note(text)
        self._training, self._validation = (_open(folder, side, self.per_sample) for side in _SIDES)
        num_sequences = len(self._training)
        if config.pack:
            self._training = self._training.packed(config.seq_len, seed)
        self.num_training = len(self._training)  # number of training samples
        self.num_validation = len(self._validation)  # number of validation samples
        self.files = {"tokenizer.json": folder / "tokenizer.json", **files_of_format(form, given)}
        sizes = token_num_bytes(load_tokenizer(folder / "tokenizer.json"), vocab_size)
        self._num_bytes_V = torch.from_numpy(sizes)
        self.description = (
            f"{corpus.source}: {num_sequences:,} training and {self.num_validation:,} validation "
            f"{'sequences of ' * corpus.is_talk}{_PLURALS[corpus.kind]}, {index['learned']:,} of {index['tokens']:,} "
            "training tokens are the assistant's" + (f", in {len(self._training):,} packed rows" if config.pack else "")
        )

    def batch(self, first_sample: int, num_samples: int) -> Rows:
        """Training samples first_sample ... first_sample + num_samples - 1, padded on the right to S tokens."""
        which = shuffled(first_sample, num_samples, total=self.num_training, seed=self._seed)
        return self.samples("training", which)

    def samples(self, side: str, which: Sequence[int]) -> Rows:
        """Samples of the training or validation split by their indices."""
        return self.split(side).rows(which, self._seq_len)

    def split(self, side: str) -> _SplitSequences:
        """Sequences of the training or validation split."""
        return self._training if side == "training" else self._validation

    @staticmethod
    def rows_of(
        talk: Conversation, name: str, form: "ChatFormat | PlainForm", seq_len: int, left_out: LeftOut
    ) -> Iterator["LearnedRow"]:
        """Sequences of a document, see `rows_of_talk`."""
        return rows_of_talk(talk, name, form, seq_len, left_out)

    def validation(
        self, max_samples: int | None, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]:
        """Batches of at most max_samples validation samples (None: all), evenly spaced.

        The third entry has the bytes of text of each counted target, (B, S) int64.
        """
        for which in spread_batches(self.num_validation, max_samples, batch_size):
            ids_BS, targets_BS, more = self.samples("validation", which)
            yield ids_BS, targets_BS, self._num_bytes_V[targets_BS] * more["counts"], more


def _open(folder: Path, side: str, per_sample: int) -> _SplitSequences:
    starts = np.load(folder / f"{side}.starts.npy")
    tokens, learned = (
        np.memmap(folder / f"{side}.{name}", dtype=dtype, mode="r", shape=(int(starts[-1]),))
        for name, dtype in (("tokens", "<u4"), ("learned", "u1"))
    )
    return _SplitSequences(tokens, learned, starts, per_sample)


def _form(tokenizer: Tokenizer, path: Path | None, *, is_plain: bool) -> ChatFormat | PlainForm:
    """Form in which the records of a corpus become rows."""
    return PlainForm(tokenizer, path) if is_plain else find_format(tokenizer, path)


def _fill(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    path: Path | None,
    *,
    vocab_size: int,
    seq_len: int,
    is_plain: bool,
    rows_of: Callable[..., Iterator["LearnedRow"]],
) -> None:
    """Write a cache entry: tokenizer, tokens of both splits, notes on cut and left out conversations."""
    if tokenizer is None:
        most = 257 + len(MARKS) + sum(document.num_bytes for document in corpus.training)
        say(f"learning a tokenizer of {vocab_size:,} tokens")
        tokenizer = train_tokenizer(_contents(corpus.training), vocab_size=min(vocab_size, most), marks=MARKS)
        say("")
    tokenizer = save_tokenizer(tokenizer, folder)
    form = _form(tokenizer, path, is_plain=is_plain)
    left_out = LeftOut()
    index: dict[str, Any] = {}
    for side, documents in zip(_SIDES, (corpus.training, corpus.validation), strict=True):
        found = _write(folder, side, documents, partial(rows_of, form=form, seq_len=seq_len, left_out=left_out))
        if not found["sequences"]:
            reasons = "".join(f"{n:,} {reason}, " for reason, n in left_out.counts.items())
            raise ConfigError(
                f"{named('data.path')}: {corpus.source}: no {corpus.kind} for {side} has an answer to learn in its "
                f"first {seq_len + 1} tokens: {reasons.removesuffix(', ') or 'all are empty'}; give others, or raise "
                f"{named('data.seq_len')}"
            )
        if side == "training":
            index |= found
    index["notes"] = _notes(corpus, left_out, seq_len)
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _notes(corpus: Corpus, left_out: LeftOut, seq_len: int) -> list[str]:
    notes = []
    for reason, count in left_out.counts.items():
        what = "" if reason in _SAID else "are left out: they"
        fix = {
            _CUT: f"after {seq_len + 1} tokens; for all of them raise {named('data.seq_len')} and "
            f"{named('model.max_seq_len')}",
            _CUT_AWAY: f"; raise {named('data.seq_len')} and {named('model.max_seq_len')}",
        }.get(reason, "")
        rows = _PLURALS[corpus.kind]
        rows = "sequences" if reason in (_CUT, _CUT_AWAY, _NO_END) and corpus.is_talk else rows
        example = f"(for example {left_out.examples[reason]})"
        line = f"{corpus.source}: {count:,} {rows} {what} {reason} {fix} {example}"
        notes.append(" ".join(line.split()).replace(" ;", ";"))
    return notes


def _contents(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        talk = json.loads(document.read())
        for message in chain.from_iterable(talk.get(name, ()) for name in (MESSAGES, *SIDES)):
            yield message["content"]


def _write(
    folder: Path,
    side: str,
    documents: Sequence[Document],
    rows_of: Callable[[Conversation, str], Iterator["LearnedRow"]],
) -> dict[str, int]:
    """Write the tokens of a split; returns their numbers."""
    starts, learned = [0], 0
    progress = Progress("tokenised", total=sum(document.num_bytes for document in documents))
    with (
        (folder / f"{side}.tokens").open("wb") as ids,
        (folder / f"{side}.learned").open("wb") as marks,
    ):
        for document in progress.over(documents, lambda document: document.num_bytes):
            for row, mask in rows_of(json.loads(document.read()), document.name):
                ids.write(np.array(row, dtype="<u4").tobytes())
                marks.write(np.array(mask, dtype="u1").tobytes())
                starts.append(starts[-1] + len(row))
                learned += sum(mask[1:])
    np.save(folder / f"{side}.starts.npy", np.array(starts, dtype=np.int64))
    return {"sequences": len(starts) - 1, "tokens": starts[-1], "learned": learned}


LearnedRow = tuple[list[int], list[bool]]
"""Token ids of a sequence, and whether each is learned."""


def rows_of_talk(
    conversation: Conversation,
    name: str,
    form: ChatFormat | PlainForm,
    seq_len: int,
    left_out: LeftOut,
) -> Iterator[LearnedRow]:
    """Sequences of a conversation, each with at least one learned target; `left_out` counts it where it is cut or left
    out."""
    if (problem := form.problem(conversation)) is not None:
        left_out.add(problem, name)
        return
    messages = conversation[MESSAGES]
    if not any(map(is_answer, messages)):
        left_out.add(_NO_ANSWER, name)
        return
    if not any(map(is_learned, messages)):
        left_out.add(_NOT_LEARNED, name)
        return
    if any(message["role"] == "assistant" and not is_answer(message) for message in messages):
        left_out.add(_EMPTY, name)
    unwritten = [name for name in _FIELDS_OF_THOUGHTS if not form.writes(name)]
    if any(message.get(name) for message in messages for name in unwritten):
        left_out.add(_THOUGHTS, name)
    try:
        samples = form.samples(conversation)
    except ConfigError as error:
        raise ConfigError(f"{named('data.path')}: {name}: {error.line.text}") from None
    for spans in samples:
        row = [i for span in spans for i in span.ids]
        mask = [span.is_learned for span in spans for _ in span.ids]
        if not any(mask[1 : seq_len + 1]):
            left_out.add(_CUT_AWAY, name)
            continue
        if len(row) > seq_len + 1:
            left_out.add(_CUT, name)
        if not _last_of_answers(spans) <= set(form.ends):
            left_out.add(_NO_END, name)
        yield row[: seq_len + 1], mask[: seq_len + 1]


def _last_of_answers(spans: Sequence[TokenSpan]) -> set[int]:
    """Last tokens of the answers; learned spans in a row are one answer."""
    following = [*spans[1:], TokenSpan([], False)]
    return {one.ids[-1] for one, after in zip(spans, following, strict=True) if one.is_learned and not after.is_learned}
