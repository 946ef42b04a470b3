"""Execution of a step on this device: forward pass, logits and sampling."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.engine.drawing import sampling_batch
from expertmesh.engine.faster_forward import FasterForward
from expertmesh.engine.kv_cache import PagedCache, PagedContext
from expertmesh.engine.output import NO_MAXIMUM, NOT_FINITE, Logprob
from expertmesh.engine.request import Sequence
from expertmesh.engine.request_adapters import Adapters, AdapterSpan
from expertmesh.engine.scheduler import Chunk, Step
from expertmesh.engine.step_tensors import BatchChunk, StepBatch, step_tensors
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.sampling import SamplingBatch, are_finite, draw, logprobs, penalised
from expertmesh.parallel.inference import broadcast_from_rank0


@dataclass(frozen=True)
class LogitsRow:
    """Row of logits that is needed.

    Attributes:
        token: index of its token in the step.
        sequence: sequence that needs it.
        position: position of the following token in the sequence.
        is_drawn: True: the following token is sampled; False: it is known, and its logprob is requested.
    """

    token: int
    sequence: Sequence
    position: int
    is_drawn: bool


@dataclass(frozen=True)
class RunnerOutput:
    """Results of a step.

    Attributes:
        tokens: sampled token of each sequence.
        logprobs: (sequence, position, logprob) of sampled and known tokens, if requested.
        broken: sequences of which no token can be drawn, each with its error, to be formatted with the number of tokens.
        experts: for chunks whose request returns them, (count, layers, K) expert ids.
    """

    tokens: dict[Sequence, int]
    logprobs: list[tuple[Sequence, int, Logprob]]
    broken: dict[Sequence, str]
    experts: list[tuple[Chunk, Tensor]]


def batch_of(step: Step) -> tuple[StepBatch, list[LogitsRow]]:
    """Inputs of a step, and the rows of logits that it must return."""
    chunks, rows, first = [], [], 0
    for chunk in step.chunks:
        sequence, stop = chunk.sequence, chunk.start + chunk.count
        ids = sequence.token_ids[chunk.start : stop]
        chunks.append(BatchChunk(ids, chunk.start, sequence.blocks, sequence.request.root))
        rows += _rows(chunk, first)
        first += chunk.count
    return StepBatch(tuple(chunks), tuple(row.token for row in rows), step.copies), rows


def runs_of(adapters: Adapters, batch: StepBatch) -> tuple[AdapterSpan, ...]:
    """Spans of a step's tokens that have an adapter."""
    return adapters.runs([(len(one.ids), one.root) for one in batch.chunks])


class Runner:
    """Model with its KV cache, which computes steps.

    Args:
        model: a model that takes flat tokens with an `AttentionContext`, as GPT.
        cache: KV cache of the model.
        compiled: compiled forward of the model; None: uncompiled.

    Attributes:
        adapters: adapters for requests; None: none were requested.
        expert_load: (E + 1,) int64 per MoE layer: tokens served so far by each expert; the last entry counts no expert.
    """

    def __init__(
        self, model: Any, cache: PagedCache, compiled: FasterForward | None = None
    ) -> None:
        self.model, self.cache, self.compiled = model, cache, compiled
        self.adapters: Adapters | None = None
        self._from_rank0 = broadcast_from_rank0(model)
        self.device = cache.k.device
        self.expert_load = [
            torch.zeros(num + 1, dtype=torch.int64, device=self.device)
            for num in model.config.experts_per_layer()
            if num
        ]

    @torch.no_grad()
    def run(self, step: Step) -> RunnerOutput:
        """Compute a step. Synchronizes with the device once."""
        batch, rows = batch_of(step)
        logits_RV, ids_of_layers = self.compute(batch)
        self._count(ids_of_layers)
        return self._result(logits_RV, rows, wanted_experts(step, ids_of_layers))

    def compute(self, batch: StepBatch) -> tuple[Tensor, list[Tensor]]:
        """Logits (R, V) of a step's rows, and (T, K) expert ids of each MoE layer."""
        self.cache.copy(batch.copies)
        step = step_tensors(batch, self.cache.block_size, self.device)
        context = PagedContext(self.cache, step.positions_T, step.slots_T, step.keys)
        with self._adapted(batch):
            return self._forward(step.ids_T, context, step.rows_R)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """See `Engine.load_adapter`."""
        self._room_for_adapters().load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        self._room_for_adapters().unload(name)

    def _room_for_adapters(self) -> Adapters:
        if self.adapters is None:
            dtype = autocast_dtype(self.model.device) or self.model.embedding.weight.dtype
            self.adapters = Adapters(self.model, dtype)
        return self.adapters

    def _adapted(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Context in which the adapters know the adapter of each token of a step."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.on(runs_of(self.adapters, batch))

    def _forward(
        self, ids_T: Tensor, context: PagedContext, rows_R: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the rows, and (T, K) expert ids of each MoE layer."""
        if self.compiled is not None and (found := self.compiled(ids_T, context, rows_R)):
            return found
        output = self.model(
            ids_T,
            context=context,
            logit_rows_R=rows_R,
            capacity_factor=self.model.config.moe.dropless_factor,
            losses=False,
        )
        return output.logits_BSV, [one.topk_expert_ids_TK for one in output.stats]

    def _count(self, ids_of_layers: list[Tensor]) -> None:
        """Add a step's choices to `expert_load`, without synchronizing."""
        for load, ids_TK in zip(self.expert_load, ids_of_layers, strict=True):
            ids = ids_TK.flatten()
            load.scatter_add_(0, ids, load.new_ones(()).expand_as(ids))

    def loads(self) -> list[list[int]]:
        """`expert_load` on the host."""
        return [load.tolist() for load in self.expert_load]

    def _result(
        self, logits_RV: Tensor, rows: list[LogitsRow], experts: list[tuple[Chunk, Tensor]]
    ) -> RunnerOutput:
        if not rows:
            return RunnerOutput({}, [], {}, experts)
        drawn = [i for i, row in enumerate(rows) if row.is_drawn]
        drawing = [rows[i].sequence for i in drawn]
        tokens: dict[Sequence, int] = {}
        broken: dict[Sequence, str] = {}
        if drawn:
            own_RV = logits_RV if len(drawn) == len(rows) else logits_RV[self._tensor(drawn)]
            is_finite_R = are_finite(own_RV)
            changed_RV = self._changed(own_RV, drawing)
            drawn_R = draw(changed_RV, self._batch(drawing))
            has_most_R = is_finite_R
            if changed_RV is not own_RV:
                has_most_R = changed_RV.amax(-1).isfinite()
            each = torch.stack((drawn_R, is_finite_R.long(), has_most_R.long()))
            found = self._from_rank0(each).tolist()
            for sequence, token, is_finite, has_most in zip(drawing, *found, strict=True):
                tokens[sequence] = token
                if not (is_finite and has_most):
                    broken[sequence] = NO_MAXIMUM if is_finite else NOT_FINITE
        sound = [
            (i, row) for i, row in enumerate(rows) if not (row.is_drawn and row.sequence in broken)
        ]
        return RunnerOutput(tokens, self._logprobs(logits_RV, sound, tokens), broken, experts)

    def _logprobs(
        self, logits_RV: Tensor, rows: list[tuple[int, LogitsRow]], tokens: dict[Sequence, int]
    ) -> list[tuple[Sequence, int, Logprob]]:
        wanted = []
        for i, row in rows:
            params = row.sequence.request.params
            count = params.logprobs if row.is_drawn else params.prompt_logprobs
            if count is not None:
                known = row.sequence.token_ids
                token = tokens[row.sequence] if row.is_drawn else known[row.position]
                wanted.append((i, row, token, count))
        if not wanted:
            return []
        own_RV = logprobs(logits_RV[self._tensor([i for i, *_ in wanted])])
        chosen_R = own_RV.gather(1, self._tensor([token for *_, token, _ in wanted])[:, None])[:, 0]
        most = min(max(count for *_, count in wanted), own_RV.shape[-1])
        top = own_RV.topk(most, dim=-1)
        values, best, best_ids = chosen_R.tolist(), top.values.tolist(), top.indices.tolist()
        found = []
        for (_, row, token, count), value, scores, names in zip(
            wanted, values, best, best_ids, strict=True
        ):
            pairs = tuple(zip(names[:count], scores[:count], strict=True))
            found.append((row.sequence, row.position, Logprob(token, value, pairs)))
        return found

    def _changed(self, logits_RV: Tensor, sequences: list[Sequence]) -> Tensor:
        """Logits with penalties, biases, JSON rules, and end tokens masked until min_tokens."""
        pairs: list[tuple[int, int, int]] = []
        biases: list[tuple[int, int]] = []
        added: list[float] = []
        banned: list[tuple[int, int]] = []
        for row, sequence in enumerate(sequences):
            params = sequence.request.params
            if (
                params.repetition_penalty != 1
                or params.presence_penalty
                or params.frequency_penalty
            ):
                times = Counter(sequence.new_ids)
                pairs += [(row, t, times[t]) for t in {*sequence.token_ids}]
            biases += [(row, t) for t in params.logit_bias]
            added += map(float, params.logit_bias.values())
            if len(sequence.new_ids) < params.min_tokens and sequence.rule is None:
                banned += [(row, t) for t in sequence.request.end_ids]
        if pairs:
            rows, ids, times_N = (self._tensor(list(t)) for t in zip(*pairs, strict=True))
            each = [sequence.request.params for sequence in sequences]
            logits_RV = penalised(
                logits_RV.double(),
                rows,
                ids,
                times_N=times_N,
                is_generated_N=times_N > 0,
                repetition_R=self._reals([p.repetition_penalty for p in each]),
                presence_R=self._reals([p.presence_penalty for p in each]),
                frequency_R=self._reals([p.frequency_penalty for p in each]),
            )
        if biases:
            index = tuple(self._tensor([one[i] for one in biases]) for i in range(2))
            logits_RV = logits_RV.double().index_put(index, self._reals(added), accumulate=True)
        if any(sequence.rule is not None for sequence in sequences):
            allowed_RV = _allowed(sequences, logits_RV.shape[-1]).to(logits_RV.device)
            logits_RV = logits_RV.masked_fill(~allowed_RV, -torch.inf)
        if banned:
            index = tuple(self._tensor([one[i] for one in banned]) for i in range(2))
            logits_RV = logits_RV.index_put(index, logits_RV.new_full((), -torch.inf))
        return logits_RV

    def _batch(self, sequences: list[Sequence]) -> SamplingBatch:
        return sampling_batch(
            [sequence.request.params for sequence in sequences],
            seeds=[sequence.request.seed for sequence in sequences],
            answers=[sequence.index for sequence in sequences],
            positions=[len(sequence.token_ids) for sequence in sequences],
            device=self.device,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _reals(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _allowed(sequences: list[Sequence], vocab_size: int) -> Tensor:
    """(R, V) bool: tokens that the rule of each sequence allows next."""
    found_RV = torch.ones(len(sequences), vocab_size, dtype=torch.bool)
    for row_V, sequence in zip(found_RV, sequences, strict=True):
        if sequence.rule is not None:
            new = sequence.new_ids
            may_end = len(new) >= sequence.request.params.min_tokens
            allowed_V = sequence.rule.allowed(new, may_end=may_end)
            if allowed_V is not None:
                row_V.copy_(allowed_V)
    return found_RV


def _rows(chunk: Chunk, first: int) -> list[LogitsRow]:
    """Rows of logits that a chunk must return; `first` is the index of its first token in the step."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    rows = []
    if sequence.request.params.prompt_logprobs is not None:
        known = range(chunk.start, min(stop, sequence.num_prompt - 1))
        rows += [LogitsRow(first + i - chunk.start, sequence, i + 1, False) for i in known]
    rows += [LogitsRow(first + chunk.count - 1, one, stop, True) for one in chunk.samples]
    return rows


def wanted_experts(step: Step, ids_of_layers: list[Tensor]) -> list[tuple[Chunk, Tensor]]:
    """Expert ids of the chunks whose requests return them, selected from all tokens of a step."""
    found, first = [], 0
    for chunk in step.chunks:
        if chunk.sequence.request.params.return_routed_experts:
            found.append((chunk, _experts_of(ids_of_layers, first, chunk.count)))
        first += chunk.count
    return found


def _experts_of(ids_of_layers: list[Tensor], first: int, count: int) -> Tensor:
    """(count, layers, most K) expert ids of some tokens; -1 pads layers with fewer choices."""
    layers = [ids_TK[first : first + count] for ids_TK in ids_of_layers]
    if not layers:
        return torch.empty(count, 0, 0, dtype=torch.int64)
    most = max(ids.shape[1] for ids in layers)
    padded = [torch.nn.functional.pad(ids, (0, most - ids.shape[1]), value=-1) for ids in layers]
    return torch.stack(padded, 1).cpu()
