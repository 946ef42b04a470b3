"""Rows of logits that a step returns: what is drawn and scored from them, in operators whose number does not depend on
the rows."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.engine.drawing import SamplingNumbers
from expertmesh.engine.output import NO_MAXIMUM, NOT_FINITE, Logprob
from expertmesh.engine.packed import REAL, WHOLE, on_host
from expertmesh.engine.request import Sequence as Answer
from expertmesh.engine.scheduler import Chunk
from expertmesh.ops.sampling import SamplingBatch, are_finite, draw, logprobs, penalised


@dataclass(frozen=True)
class LogitsRow:
    """Row of logits that is needed."""

    token: int  # index of its token in the step
    sequence: Answer  # sequence that needs it
    position: int  # position of the following token in the sequence
    is_drawn: bool  # True: the following token is sampled; False: it is known, and its logprob is requested

    @property
    def num_best(self) -> int | None:
        """Number of most likely tokens whose logprobs are requested; None: no logprob is."""
        params = self.sequence.request.params
        return params.logprobs if self.is_drawn else params.prompt_logprobs


@dataclass(frozen=True)
class RunnerOutput:
    """Results of a step."""

    tokens: dict[Answer, int]  # sampled token of each sequence
    # (sequence, position, logprob) of sampled and known tokens, if requested
    logprobs: list[tuple[Answer, int, Logprob]]
    # sequences of which no token can be drawn, each with its error, to be formatted with the number of tokens
    broken: dict[Answer, str]
    experts: list[tuple[Chunk, Any]]  # for chunks whose request returns them, (count, layers, K) expert ids


class _Changes(NamedTuple):
    """Changes of logits before a token is drawn, as numbers or as tensors."""

    rows_N: Any  # rows of the N tokens in prompts and answers with penalties
    ids_N: Any
    times_N: Any  # how often each is in the answer
    repetition_R: Any  # see `penalised`
    presence_R: Any  # see `penalised`
    frequency_R: Any  # see `penalised`
    bias_rows_M: Any  # rows of M biased tokens
    bias_ids_M: Any
    biases_M: Any  # what is added to their logits
    ban_rows_L: Any  # rows of L tokens that must not be drawn
    ban_ids_L: Any


class _ScoredTokens(NamedTuple):
    """Tokens whose logprobs are requested, as numbers or as tensors."""

    rows_W: Any
    known_W: Any  # the tokens; -1: the token that is drawn
    places_W: Any  # places among the drawn tokens; 0 for known ones


def drawn_of(logits_RV: Tensor, batch: SamplingBatch, changed_RV: Tensor | None = None) -> Tensor:
    """(3, R) int64: a token of each row, whether its logits are finite, and whether the changed ones have a finite
    maximum."""
    is_finite_R = are_finite(logits_RV)
    if changed_RV is None:
        return torch.stack((draw(logits_RV, batch), is_finite_R.long(), is_finite_R.long()))
    has_most_R = changed_RV.amax(-1).isfinite()
    return torch.stack((draw(changed_RV, batch), is_finite_R.long(), has_most_R.long()))


class RowNumbers:
    """Rows of logits of a step with everything about them that the host knows.

    Args:
        num_padded: number of rows of the padded step; None: it is not padded.
    """

    def __init__(self, rows: Sequence[LogitsRow], num_padded: int | None = None) -> None:
        self.rows = rows
        drawn = [i for i, row in enumerate(rows) if row.is_drawn]
        self._drawing = [rows[i].sequence for i in drawn]
        self._all_drawn = len(drawn) == len(rows)
        # sampling parameters of the rows that are drawn
        self.sampling = SamplingNumbers.of(
            [one.request.params for one in self._drawing],
            seeds=[one.request.seed for one in self._drawing],
            answers=[one.index for one in self._drawing],
            positions=[len(one.token_ids) for one in self._drawing],
            num_rows=num_padded,
        )
        self._has_rules = any(one.rule is not None for one in self._drawing)
        changes = _changes(self._drawing)
        self._has_changes = self._has_rules or any(map(len, changes))
        self.scored = [(i, row) for i, row in enumerate(rows) if row.num_best is not None]
        place = {i: number for number, i in enumerate(drawn)}
        scores = _ScoredTokens(
            array(WHOLE, [i for i, _ in self.scored]),
            array(
                WHOLE,
                [-1 if row.is_drawn else row.sequence.token_ids[row.position] for _, row in self.scored],
            ),
            array(WHOLE, [place.get(i, 0) for i, _ in self.scored]),
        )
        self.parts = (array(WHOLE, drawn), *changes, *scores)  # further numbers, for `packed`

    def results(
        self,
        logits_RV: Tensor,  # the rows
        batch: SamplingBatch | None,  # sampling parameters on the device; None: no row is drawn
        tensors: Sequence[Tensor],  # the parts on the device
        experts: "WantedExperts",  # expert ids to return
        *,
        drawn_3R: Tensor | None = None,  # result of `drawn_of` without changes, if it is known
        agreed: Callable[[Tensor], Tensor] = lambda drawn: drawn,  # gives all ranks the same tokens
    ) -> RunnerOutput:
        """Draw and score tokens; waits for the device once, if anything is wanted of it."""
        rows_R, *rest = tensors
        changes, scores = _Changes(*rest[: len(_Changes._fields)]), rest[len(_Changes._fields) :]
        wanted: list[Tensor] = []
        if self._drawing:
            if drawn_3R is None or self._has_changes:
                assert batch is not None
                own_RV = logits_RV if self._all_drawn else logits_RV[rows_R]
                changed_RV = self._changed(own_RV, changes) if self._has_changes else None
                drawn_3R = drawn_of(own_RV, batch.first(len(own_RV)), changed_RV)
            drawn_3R = agreed(drawn_3R)
            wanted.append(drawn_3R)
        if self.scored:
            wanted += self._scores(logits_RV, _ScoredTokens(*scores), drawn_3R)
        found = on_host([*wanted, *experts.tensors])
        tokens: dict[Answer, int] = {}
        broken: dict[Answer, str] = {}
        if self._drawing:
            for sequence, token, is_finite, has_most in zip(self._drawing, *found.pop(0).tolist(), strict=True):
                tokens[sequence] = token
                if not (is_finite and has_most):
                    broken[sequence] = NO_MAXIMUM if is_finite else NOT_FINITE
        scored = self._logprobs(found, broken) if self.scored else []
        return RunnerOutput(tokens, scored, broken, experts.of(found[-1]) if experts.tensors else [])

    def _scores(self, logits_RV: Tensor, scores: _ScoredTokens, drawn_3R: Tensor | None) -> tuple[Tensor, ...]:
        """Ids and logprobs (W,), and the most likely tokens' logprobs and ids."""
        ids_W = scores.known_W
        if drawn_3R is not None:
            ids_W = torch.where(ids_W < 0, drawn_3R[0][scores.places_W], ids_W)
        scores_WV = logprobs(logits_RV[scores.rows_W])
        chosen_W = scores_WV.gather(1, ids_W[:, None])[:, 0]
        most = min(max(row.num_best or 0 for _, row in self.scored), scores_WV.shape[-1])
        return ids_W, chosen_W, *scores_WV.topk(most, dim=-1)

    def _logprobs(self, found: list[Tensor], broken: dict[Answer, str]) -> list[tuple[Answer, int, Logprob]]:
        scored = []
        each = zip(self.scored, *(one.tolist() for one in found[:4]), strict=True)
        for (_, row), token, value, best, ids in each:
            if not (row.is_drawn and row.sequence in broken):
                pairs = tuple(zip(ids[: row.num_best], best[: row.num_best], strict=True))
                scored.append((row.sequence, row.position, Logprob(token, value, pairs)))
        return scored

    def _changed(self, logits_RV: Tensor, changes: _Changes) -> Tensor:
        """Logits with penalties, biases, JSON rules, and end tokens masked until min_tokens."""
        if len(changes.rows_N):
            logits_RV = penalised(
                logits_RV.double(),
                changes.rows_N,
                changes.ids_N,
                times_N=changes.times_N,
                is_generated_N=changes.times_N > 0,
                repetition_R=changes.repetition_R,
                presence_R=changes.presence_R,
                frequency_R=changes.frequency_R,
            )
        if len(changes.biases_M):
            index = changes.bias_rows_M, changes.bias_ids_M
            logits_RV = logits_RV.double().index_put(index, changes.biases_M, accumulate=True)
        if self._has_rules:
            # a copy of its own: masks are made while the device computes the logits
            allowed_RV = torch.from_numpy(_allowed(self._drawing, logits_RV.shape[-1]))
            logits_RV = logits_RV.masked_fill(~allowed_RV.to(logits_RV.device), -torch.inf)
        if len(changes.ban_ids_L):
            index = changes.ban_rows_L, changes.ban_ids_L
            logits_RV = logits_RV.index_put(index, logits_RV.new_full((), -torch.inf))
        return logits_RV


class WantedExperts:
    """Expert ids that requests return, of some tokens of a step.

    Args:
        ids_of_layers: (T, K) expert ids of each MoE layer, of all tokens of the step.
    """

    def __init__(self, chunks: Sequence[Chunk], ids_of_layers: Sequence[Tensor]) -> None:
        self._chunks: list[tuple[Chunk, int]] = []
        self.tensors: list[Tensor] = []  # nothing, or (T, layers, most K) expert ids; -1 pads layers with fewer choices
        first = 0
        for chunk in chunks:
            if chunk.sequence.request.params.return_routed_experts:
                self._chunks.append((chunk, first))
            first += chunk.count
        if self._chunks and not ids_of_layers:
            self.tensors = [torch.empty(first, 0, 0, dtype=torch.int64)]
        elif self._chunks:
            most = max(ids.shape[1] for ids in ids_of_layers)
            each = (torch.nn.functional.pad(ids, (0, most - ids.shape[1]), value=-1) for ids in ids_of_layers)
            self.tensors = [torch.stack(tuple(each), 1)]

    def of(self, ids_TLK: Tensor) -> list[tuple[Chunk, Any]]:
        """(count, layers, most K) expert ids of each chunk that wants them, as arrays, from those on the host."""
        whole = ids_TLK.numpy()
        return [(chunk, whole[first : first + chunk.count]) for chunk, first in self._chunks]


def rows_of(chunks: Sequence[Chunk]) -> list[LogitsRow]:
    """Rows of logits that a step must return."""
    firsts = accumulate((chunk.count for chunk in chunks), initial=0)
    return [row for one, first in zip(chunks, firsts, strict=False) for row in _rows(one, first)]


def _rows(chunk: Chunk, first: int) -> list[LogitsRow]:
    """Rows of logits that a chunk must return; `first` is the index of its first token in the step."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    rows = []
    if sequence.request.params.prompt_logprobs is not None:
        known = range(chunk.start, min(stop, sequence.num_prompt - 1))
        rows += [LogitsRow(first + i - chunk.start, sequence, i + 1, False) for i in known]
    rows += [LogitsRow(first + chunk.count - 1, one, stop, True) for one in chunk.samples]
    return rows


def _changes(sequences: Sequence[Answer]) -> _Changes:
    """Changes of the logits of sequences, without the masks of rules."""
    pairs: list[tuple[int, int, int]] = []
    biases: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int]] = []
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            times = Counter(sequence.new_ids)
            pairs += [(row, t, times[t]) for t in {*sequence.token_ids}]
        biases += [(row, t, float(bias)) for t, bias in params.logit_bias.items()]
        is_short = len(sequence.token_ids) - sequence.num_prompt < params.min_tokens
        if is_short and sequence.rule is None:
            banned += [(row, t) for t in sequence.request.end_ids]
    each = [sequence.request.params for sequence in sequences] if pairs else []
    parts = (
        *(array(WHOLE, [pair[i] for pair in pairs]) for i in range(3)),
        array(REAL, [params.repetition_penalty for params in each]),
        array(REAL, [params.presence_penalty for params in each]),
        array(REAL, [params.frequency_penalty for params in each]),
        *(array(WHOLE, [bias[i] for bias in biases]) for i in range(2)),
        array(REAL, [bias for *_, bias in biases]),
        *(array(WHOLE, [ban[i] for ban in banned]) for i in range(2)),
    )
    return _Changes._make(parts)


def _allowed(sequences: Sequence[Answer], vocab_size: int) -> Any:
    """(R, V) bool array: tokens that the rule of each sequence allows next."""
    found_RV = np.ones((len(sequences), vocab_size), np.bool_)
    for row_V, sequence in zip(found_RV, sequences, strict=True):
        if sequence.rule is not None:
            new = sequence.new_ids
            may_end = len(new) >= sequence.request.params.min_tokens
            allowed_V = sequence.rule.allowed(new, may_end=may_end)
            if allowed_V is not None:
                row_V[:] = allowed_V
    return found_RV
