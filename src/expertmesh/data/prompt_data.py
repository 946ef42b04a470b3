"""Prompts as the data of a run that learns from its own answers; other columns of a record go to reward functions."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.base import expanded
from expertmesh.config.text import TextConfig
from expertmesh.data.candidates import Notices, find_documents, option_of
from expertmesh.data.conversation_lines import checked
from expertmesh.data.corpus import Document, split_documents
from expertmesh.data.data_progress import note
from expertmesh.data.order import shuffled, spread_batches
from expertmesh.data.plain_completions import PlainForm
from expertmesh.data.records import Row
from expertmesh.errors import ConfigError, Line, named
from expertmesh.text.chat import MESSAGES
from expertmesh.text.format import files_of_format, find_format
from expertmesh.text.tokenizer import given_tokenizer

FORMAT_VERSION = 1
DEFAULT_COLUMN = "prompt"
_BESIDE = ("system", "tools")


@dataclass(frozen=True)
class PromptRecord:
    """A prompt."""

    given: Any  # text or messages, as the record has it
    ids: tuple[int, ...]  # its token ids, with the beginning of an answer
    columns: Mapping[str, Any] = field(compare=False)  # other fields of the record
    where: str = field(compare=False)  # its place in the data

    @property
    def is_talk(self) -> bool:
        """Whether it is a list of messages."""
        return not isinstance(self.given, str)


class PromptData:
    """Prompts of files, split into training and validation; equal prompts are on one side.

    Samples are numbers of prompts, {"prompt": (B,) int64}: the prompts themselves are in `prompts`.

    Args:
        config: options of the data; `encode_with` names the tokenizer, `column` the field of the prompt.
    """

    def __init__(self, config: TextConfig, *, vocab_size: int, seed: int, room: int) -> None:
        path = None if config.encode_with is None else expanded(config.encode_with)
        if path is None:
            raise ConfigError(
                f"{named('objective.name')}: prompts need the tokenizer of a trained model; name its folder in the "
                "place of the"
                f" recipe, or {named('data.encode_with')}"
            )
        self.tokenizer = given_tokenizer(path, vocab_size=vocab_size)
        is_plain = config.completions == "text"
        form = PlainForm(self.tokenizer, path) if is_plain else find_format(self.tokenizer, path)
        self.ends = tuple(form.ends)  # tokens that end an answer
        self._seed = seed
        render = _Rendered(form, room)
        source, *sides = _records(config)
        found = [[render.prompt(*one) for one in side] for side in sides]
        self.prompts = [prompt for side in found for prompt in side]  # all prompts, training ones first
        self.num_training, self.num_validation = map(len, found)
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, self.tokenizer.to_str()]).encode())
        for side in found:
            digest.update(f"{len(side)}\n".encode())
            for one in side:
                record = json.dumps([one.ids, dict(one.columns)], sort_keys=True, default=str)
                digest.update(record.encode() + b"\n")
        self.key = digest.hexdigest()[:24]
        self.files: dict[str, Path] = {"tokenizer.json": path, **files_of_format(form, path)}
        self.description = (
            f"{source}: {self.num_training:,} training and {self.num_validation:,} validation prompts of at most"
            f" {max(len(one.ids) for one in self.prompts):,} tokens"
        )

    def batch(self, first_sample: int, num_samples: int) -> dict[str, Tensor]:
        """Numbers of training prompts first_sample ... first_sample + num_samples - 1, {"prompt": (B,) int64}."""
        which = shuffled(first_sample, num_samples, total=self.num_training, seed=self._seed)
        return {"prompt": torch.tensor(which, dtype=torch.int64)}

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Batches of numbers of at most max_samples validation prompts (None: all), evenly spaced."""
        for which in spread_batches(self.num_validation, max_samples, batch_size):
            yield {"prompt": torch.tensor(which, dtype=torch.int64) + self.num_training}


@dataclass(frozen=True)
class _Rendered:
    """Conversion of records to prompts by a chat format, or by the form of plain completions."""

    form: Any
    room: int

    def prompt(self, values: Mapping[str, Any], name: str, where: str) -> PromptRecord:
        """The prompt of a record, in the field `name`."""
        given = values[name]
        columns = {key: value for key, value in values.items() if key not in (name, *_BESIDE)}
        try:
            ids = self._ids(given, values)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{named('data.path')}: {where}: {error}") from None
        if len(ids) > self.room:
            raise ConfigError(
                f"{named('data.path')}: {where}: the prompt has {len(ids)} tokens, and {named('rl.max_tokens')} "
                "leaves room for"
                f" {self.room}; shorten it, lower that, or raise {named('data.seq_len')}"
            )
        return PromptRecord(given, tuple(ids), columns, where)

    def _ids(self, given: Any, values: Mapping[str, Any]) -> list[int]:
        beside = {key: values[key] for key in _BESIDE if values.get(key)}
        if isinstance(self.form, PlainForm):
            if not isinstance(given, str) or beside:
                what = "a list of messages" if not isinstance(given, str) else "system or tools"
                raise ValueError(
                    f"has {what}, which a plain text ({named('data.completions', 'text')}) has no place for"
                )
            return self.form.prompt(given)
        is_text = isinstance(given, str)
        messages = [{"role": "user", "content": given}] if is_text else given
        if isinstance(beside.get("system"), str):
            messages = [{"role": "system", "content": beside.pop("system")}, *messages]
        talk = checked({MESSAGES: messages, **beside})
        if talk[MESSAGES][-1]["role"] == "assistant":
            raise ValueError(
                "its last turn is an answer, which the model is to write; take it out, or move it to a column of its "
                "own"
            )
        if (problem := self.form.problem(talk)) is not None:
            raise ValueError(f"has messages that {problem}")
        found: list[int] = self.form.prompt(talk[MESSAGES], tools=talk.get("tools"))
        return found


_Record = tuple[Mapping[str, Any], str, str]
"""Values of a record, the field of its prompt, and its place."""


def _records(config: TextConfig) -> tuple[str, list[_Record], list[_Record]]:
    """Description of the data, training and validation records."""
    column = config.column or DEFAULT_COLUMN
    notices = Notices()
    source, candidates = find_documents(config.model_copy(update={"column": column}), notices)
    documents, found = [], {}
    for name, read, place, own_name, shown in candidates:
        if not isinstance(read, Row) or read.shape is None:
            raise ConfigError(
                f"{option_of(config)}: {shown or name} is no record of a prompt; give .jsonl, .json, .csv or .parquet "
                "with a field"
                f" {column!r}, or name another: {named('data.column', 'NAME')}"
            )
        values = _values(read, column, shown or name)
        key = json.dumps(values[column], sort_keys=True)
        found[name] = values, column, shown or name
        documents.append(Document(name, len(key), hashlib.sha256(key.encode()).digest(), _reader(key), place, own_name))
    for kind in (notices.left_out, notices.as_text):
        if kind.total:
            note(Line(f"{option_of(config)}: left out: {kind}"))
    sides = split_documents(documents, config.validation_fraction) if documents else ([], [])
    if not all(sides):
        raise ConfigError(
            f"{option_of(config)}: {len(documents)} prompts cannot be split into training and validation, which equal "
            "ones do"
            " not cross; give more"
        )
    training, validation = ([found[one.name] for one in side] for side in sides)
    return source, training, validation


def _reader(text: str) -> Callable[[], str]:
    return lambda: text


def _values(row: Row, column: str, where: str) -> Mapping[str, Any]:
    try:
        values = row.values()
    except ValueError as error:
        raise ConfigError(f"{named('data.path')}: {where}: {error}; correct it") from None
    given = values.get(column) if isinstance(values, Mapping) else None
    if not (isinstance(given, str | list) and given):
        raise ConfigError(
            f"{named('data.path')}: {where}: has no text or list of messages in {column!r}; correct it, or name "
            "another:"
            f" {named('data.column', 'NAME')}"
        )
    return dict(values)
