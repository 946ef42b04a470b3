"""Training data for translation and denoising: each sample is a function of its global number, tasks are drawn with a
temperature."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from expertmesh.data.data_progress import note
from expertmesh.data.noise import ENDS_OF_SENTENCES, Draws, add_noise
from expertmesh.data.order import evenly_spaced, permutation
from expertmesh.errors import ConfigError, named
from expertmesh.text.tokenizer import END_OF_TEXT_ID, load_tokenizer
from expertmesh_families.seq2seq.config import ParallelTextConfig
from expertmesh_families.seq2seq.parallel_text import (
    MASK_ID,
    Corpus,
    ParallelTokens,
    prepare_parallel,
    source_ids,
    tag_id,
)

CHUNK = 4096
"""Samples that are drawn and grouped by length together."""
TranslationBatch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Sources (B, S), their lengths (B,), targets (B, S') with the end of text, their lengths (B,), indices of their tasks
(B,); int64."""


@dataclass(frozen=True)
class Examples:
    """Examples of one task."""

    source: str  # source language
    target: str  # target language; the source language for denoising
    where: np.ndarray  # (n, 2) index of the corpus and of the line of each example
    lengths: np.ndarray  # (n,) tokens of source and target together
    num_long: int = 0  # number of examples left out because they are longer than the model's maximum lengths

    @property
    def name(self) -> str:
        """Name of the task: such as en-de for translation, en for denoising."""
        return self.source if self.source == self.target else f"{self.source}-{self.target}"


def probabilities(
    counts: Sequence[int],  # examples of each task; a task with 0 is never drawn
    *,
    temperature: float,  # 1 or more
    kinds: Sequence[int] | None = None,  # index of each task's kind; None: there is one kind
    shares: Sequence[float] = (1.0,),  # share of each kind in all samples
) -> np.ndarray:
    """Probabilities of the tasks, proportional to count^(1 / temperature) within each kind of task."""
    sizes = np.asarray(counts, dtype=np.float64)
    weights = np.where(sizes > 0, sizes ** (1.0 / temperature), 0.0)
    of_task = np.zeros(len(sizes), dtype=np.int64) if kinds is None else np.asarray(kinds)
    for kind, share in enumerate(shares):
        total = weights[of_task == kind].sum()
        weights[of_task == kind] *= share / total if total else 0.0
    found: np.ndarray = weights / weights.sum()
    return found


class Mixture:
    """Sampler of tasks and examples: each sample of a run is a pure function of seed and sample number.

    In a chunk of samples every task gets its share, rounded to whole samples. Each task goes through its examples in
    epochs of its own, so no example is repeated before all others of the task were drawn.
    """

    def __init__(self, tasks: Sequence[Examples], shares: np.ndarray, *, seed: int, neighbours: int) -> None:
        self._tasks, self._shares = tasks, shares
        self._seed, self._neighbours = seed, neighbours
        self._used = [np.zeros(len(tasks), dtype=np.int64)]
        self.chunk = lru_cache(maxsize=2)(self._chunk)

    def _used_before(self, chunk: int) -> np.ndarray:
        """Number of samples of each task before a chunk, (tasks,); computed chunk by chunk and cached."""
        while len(self._used) <= chunk:
            done = self._used[-1]
            owed = len(self._used) * CHUNK * self._shares - done
            whole = np.floor(np.maximum(owed, 0)).astype(np.int64)
            while (rest := CHUNK - int(whole.sum())) != 0:  # by the largest fractions
                order = np.argsort(whole - owed if rest > 0 else owed - whole, kind="stable")
                order = order[(self._shares[order] > 0) if rest > 0 else (whole[order] > 0)]
                whole[order[: abs(rest)]] += 1 if rest > 0 else -1
            self._used.append(done + whole)
        return self._used[chunk]

    def _chunk(self, chunk: int) -> np.ndarray:
        """Samples of a chunk in order, (CHUNK, 3): task, example, and number of earlier samples of the task."""
        first, stop = self._used_before(chunk), self._used_before(chunk + 1)
        rows, lengths = [], []
        for index, task in enumerate(self._tasks):
            numbers = np.arange(first[index], stop[index])
            if not len(numbers):
                continue
            total = len(task.where)
            epochs, places = np.divmod(numbers, total)
            examples = np.empty(len(numbers), dtype=np.int64)
            for epoch in np.unique(epochs):
                order = permutation(total, _mixed(self._seed, task.name), int(epoch))
                examples[epochs == epoch] = order[places[epochs == epoch]]
            rows.append(np.stack([np.full(len(numbers), index), examples, numbers], 1))
            lengths.append(task.lengths[examples])
        draws = Draws(self._seed, "chunk", chunk)
        all_rows, all_lengths = np.concatenate(rows), np.concatenate(lengths)
        mixed = draws.order(CHUNK)
        mixed = mixed[np.argsort(all_lengths[mixed], kind="stable")]
        runs = [mixed[start : start + self._neighbours] for start in range(0, CHUNK, self._neighbours)]
        order = np.concatenate([runs[i] for i in draws.order(len(runs))])
        found: np.ndarray = all_rows[order]
        return found

    def samples(self, first_sample: int, num_samples: int) -> Iterator[tuple[int, int, int]]:
        """Task, example and number of earlier samples of the task, for each sample."""
        for sample in range(first_sample, first_sample + num_samples):
            chunk, place = divmod(sample, CHUNK)
            task, example, number = self.chunk(chunk)[place]
            yield int(task), int(example), int(number)


class TranslationData:
    """Data of a run: translation in all directions, and denoising.

    Attributes:
        tasks: names of the training tasks, such as en-de, or en for denoising; the task indices of a training batch
            refer to it.
    """

    def __init__(
        self,
        config: ParallelTextConfig,  # options of the data
        *,
        vocab_size: int,  # V of the model
        max_source_len: int,  # longest source with its two special tokens; longer examples are left out
        max_target_len: int,  # longest target with its special token; longer examples are left out
        seed: int,  # seed of order and noise
    ) -> None:
        tokens = prepare_parallel(config, vocab_size=vocab_size)
        self.languages = tokens.languages  # languages in the order of their tags
        self.files = {"tokenizer.json": tokens.tokenizer_path}
        self._config, self._tokens, self._seed = config, tokens, seed
        limits = max_source_len - 2, max_target_len - 1
        pairs, every = _directions(config, tokens.texts, tokens.languages)
        translation = [_translation(tokens.training, *pair, limits=limits) for pair in pairs]
        found = [_translation(tokens.validation, *pair, limits=limits) for pair in every]
        too_long = [sum(task.num_long for task in tasks) for tasks in (translation, found)]
        for task in translation:
            if not len(task.where) and config.pairs:
                raise ConfigError(
                    "data.pairs",
                    task.name,
                    "no line has both languages within the model's lengths",
                    "leave it out",
                )
        translation = [task for task in translation if len(task.where)]
        if not translation:
            raise ConfigError(
                "data.path",
                " ".join(config.path),
                f"no line has two languages within {named('model.max_source_len', max_source_len)} and "
                f"{named('model.max_seq_len', max_target_len)}",
                "give more data or raise them",
            )
        denoising = []
        if config.denoising:
            codes = [code for code in tokens.languages if code in tokens.texts]
            denoising = [_denoising(tokens.training, code, limits) for code in codes]
        self._tasks = [*translation, *denoising]
        self.tasks = tuple(task.name for task in self._tasks)
        shares = probabilities(
            [len(task.where) for task in self._tasks],
            temperature=config.temperature,
            kinds=[0] * len(translation) + [1] * len(denoising),
            shares=(1 - config.denoising, config.denoising),
        )
        self.mixture = Mixture(self._tasks, shares, seed=seed, neighbours=config.neighbours)
        self._validation = [task for task in found if len(task.where)]
        if not self._validation:
            raise ConfigError(
                "data.validation_split",
                config.validation_split,
                f"has no line in two of the languages within {named('model.max_source_len', max_source_len)} and "
                f"{named('model.max_seq_len', max_target_len)}",
                "add some, or raise them",
            )
        if any(too_long):
            path = named("data.path", " ".join(config.path))
            lengths = f"{named('model.max_source_len', max_source_len)} or {named('model.max_seq_len', max_target_len)}"
            note(
                f"{path}: {too_long[0]:,} training and {too_long[1]:,} validation examples are left out: longer than "
                f"{lengths}; raise them"
            )
        # names of the validation directions, such as en-de; the task indices of a validation batch refer to it
        self.directions = tuple(task.name for task in self._validation)
        self.num_validation = sum(len(task.where) for task in self._validation)
        self._sentence_ends = _sentence_ends(tokens, vocab_size)
        # the key of the tokens depends on the content of a given tokenizer, so its path is left out here
        nameless = config.model_copy(update={"encode_with": None})
        options = nameless.model_dump_json(exclude={"cache_dir", "path", "encoding"})
        self.key = hashlib.sha256(f"{tokens.key}|{options}|{max_source_len}|{max_target_len}".encode()).hexdigest()
        self.description = (
            f"{', '.join(config.path)}: {len(tokens.texts)} languages, "
            f"{sum(len(task.where) for task in translation):,} training and "
            f"{self.num_validation:,} validation examples in {len(translation)} directions"
            + (f", {config.denoising:.0%} of the samples denoise" if denoising else "")
        )

    def batch(self, first_sample: int, num_samples: int) -> TranslationBatch:
        """Training samples first_sample ... first_sample + num_samples - 1, padded to the longest one."""
        rows = []
        for index, example, number in self.mixture.samples(first_sample, num_samples):
            task = self._tasks[index]
            source, target = self._example(self._tokens.training, task, example)
            if task.source == task.target:
                source = add_noise(
                    source,
                    Draws(self._seed, "noise", task.name, number),
                    fraction=self._config.noise_fraction,
                    mean_span=self._config.mean_span,
                    mask_id=MASK_ID,
                    sentence_ends=self._sentence_ends if self._config.permute_sentences else None,
                )
            rows.append((source, target, task.target, index))
        return self._batch(rows)

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[TranslationBatch]:
        """Batches of at most max_samples validation translations, spread evenly over all directions, the shortest
        first."""
        places = [(index, line) for index, task in enumerate(self._validation) for line in range(len(task.where))]
        chosen = [places[i] for i in evenly_spaced(len(places), max_samples)]
        chosen.sort(key=lambda place: int(self._validation[place[0]].lengths[place[1]]))
        for start in range(0, len(chosen), batch_size):
            rows = []
            for index, line in chosen[start : start + batch_size]:
                task = self._validation[index]
                source, target = self._example(self._tokens.validation, task, line)
                rows.append((source, target, task.target, index))
            yield self._batch(rows)

    def _example(self, corpora: Sequence[Corpus], task: Examples, example: int) -> tuple[np.ndarray, np.ndarray]:
        corpus, line = (int(number) for number in task.where[example])
        return corpora[corpus][task.source].line(line), corpora[corpus][task.target].line(line)

    def _batch(self, rows: Sequence[tuple[np.ndarray, np.ndarray, str, int]]) -> TranslationBatch:
        sources = [source_ids(source.tolist(), tag=tag_id(self.languages, code)) for source, _, code, _ in rows]
        targets = [[*target.tolist(), END_OF_TEXT_ID] for _, target, _, _ in rows]
        return (
            *_padded(sources),
            *_padded(targets),
            torch.tensor([index for *_, index in rows]),
        )


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return padded, lengths


def _directions(
    config: ParallelTextConfig, texts: Sequence[str], tagged: Sequence[str]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Directions for training and for evaluation; directions left out of training are evaluated."""
    given = {name: [tuple(pair.split("-")) for pair in getattr(config, name)] for name in ("pairs", "without_pairs")}
    for name, pairs in given.items():
        for source, target in pairs:
            for code, known in ((source, texts), (target, texts), (target, tagged)):
                if code not in known:
                    raise ConfigError(
                        f"data.{name}",
                        f"{source}-{target}",
                        f"the language {code} is not there",
                        f"known here: {', '.join(known)}",
                    )
    usual = [(a, b) for a, b in permutations(texts, 2) if b in tagged]
    every = [(a, b) for a, b in (given["pairs"] or usual)]
    if not every:
        raise ConfigError(
            "data.languages",
            " ".join(texts),
            f"none of them has a tag in the given tokenizer, which writes {', '.join(tagged)}",
            "take one of these in, or learn another vocabulary",
        )
    kept = [pair for pair in every if pair not in given["without_pairs"]]
    if not kept:
        left_out = " ".join(config.without_pairs)
        raise ConfigError(
            "data.without_pairs",
            left_out,
            f"leaves no direction to train of {', '.join((f'{a}-{b}' for a, b in every))}",
            "name fewer",
        )
    others = [(a, b) for a, b in given["without_pairs"] if (a, b) not in every]
    return kept, every + others


def _translation(corpora: Sequence[Corpus], source: str, target: str, *, limits: tuple[int, int]) -> Examples:
    """Examples of a direction: lines that both languages have, within the maximum lengths."""
    where, lengths = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    num_long = 0
    for index, corpus in enumerate(corpora):
        if source not in corpus or target not in corpus:
            continue
        a, b = corpus[source].lengths, corpus[target].lengths
        both = (a > 0) & (b > 0)
        lines = np.flatnonzero(both & (a <= limits[0]) & (b <= limits[1]))
        num_long += int(both.sum()) - len(lines)
        where.append(np.stack([np.full(len(lines), index), lines], 1))
        lengths.append((a + b)[lines])
    return Examples(source, target, np.concatenate(where), np.concatenate(lengths), num_long)


def _denoising(corpora: Sequence[Corpus], code: str, limits: tuple[int, int]) -> Examples:
    """Examples of denoising: lines of at least two tokens, so that one can be masked and one kept."""
    found = _translation(corpora, code, code, limits=(min(limits), min(limits)))
    long = found.lengths > 2
    return Examples(code, code, found.where[long], found.lengths[long])


def _sentence_ends(tokens: ParallelTokens, vocab_size: int) -> np.ndarray:
    """Mask (V,) bool of the tokens that end sentences."""
    ends = np.zeros(vocab_size, dtype=bool)
    tokenizer = load_tokenizer(tokens.tokenizer_path)
    for sign in ENDS_OF_SENTENCES:
        ids = tokenizer.encode(sign, add_special_tokens=False).ids
        if len(ids) == 1:
            ends[ids[0]] = True
    return ends


def _mixed(seed: int, name: str) -> int:
    """Seed of a task, from the run's seed and the task's name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
