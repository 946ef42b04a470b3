"""Execution of a step on this device: forward pass, logits and sampling."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.engine.faster_forward import Computed, FasterForward
from expertmesh.engine.kv_cache import PagedCache, PagedContext
from expertmesh.engine.logits_rows import (
    LogitsRow,
    RowNumbers,
    RunnerOutput,
    WantedExperts,
    drawn_of,
    rows_of,
)
from expertmesh.engine.request_adapters import Adapters, AdapterSpan
from expertmesh.engine.scheduler import Step
from expertmesh.engine.step_tensors import (
    BatchChunk,
    Padding,
    StepBatch,
    StepTensors,
    step_tensors,
)
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.parallel.inference import broadcast_from_rank0


def batch_of(step: Step) -> tuple[StepBatch, list[LogitsRow]]:
    """Inputs of a step, and the rows of logits that it must return."""
    chunks, rows = [], rows_of(step.chunks)
    for chunk in step.chunks:
        sequence = chunk.sequence
        ids = sequence.token_ids[chunk.start : chunk.start + chunk.count]
        chunks.append(BatchChunk(ids, chunk.start, sequence.blocks, sequence.request.root))
    return StepBatch(tuple(chunks), tuple(row.token for row in rows), step.copies), rows


def runs_of(adapters: Adapters, batch: StepBatch) -> tuple[AdapterSpan, ...]:
    """Spans of a step's tokens that have an adapter."""
    return adapters.runs([(len(one.ids), one.root) for one in batch.chunks])


class Runner:
    """Model with its KV cache, which computes steps.

    Args:
        model: a model that takes flat tokens with an `AttentionContext`, as GPT.
        faster: faster forward of the model; None: there is none.
    """

    def __init__(self, model: Any, cache: PagedCache, faster: FasterForward | None = None) -> None:
        self.model, self.cache, self.faster = model, cache, faster
        self.adapters: Adapters | None = None  # adapters for requests; None: none were requested
        self._from_rank0 = broadcast_from_rank0(model)
        self.device = cache.k.device
        sizes = [num + 1 for num in model.config.experts_per_layer() if num]
        self._loads = torch.zeros(sum(sizes), dtype=torch.int64, device=self.device)
        # (E + 1,) int64 per MoE layer: tokens served so far by each expert; the last entry counts no expert
        self.expert_load = list(self._loads.split(sizes))
        self._offsets: tuple[list[int], Tensor] = ([], self._loads)
        self._ones = self._loads.new_ones(())

    @torch.no_grad()
    def run(self, step: Step) -> RunnerOutput:
        """Compute a step. Synchronizes with the device once."""
        batch, rows = batch_of(step)
        padding = None
        if self.faster is not None and all(row.is_drawn for row in rows):
            padding = self.faster.padding(batch)
        numbers = RowNumbers(rows, None if padding is None else padding.num)
        found, tensors = self.compute(batch, numbers, padding)
        return numbers.results(
            found.logits_RV,
            tensors.sampling,
            tensors.more,
            WantedExperts(step.chunks, found.ids_of_layers),
            drawn_3R=found.drawn_3R,
            agreed=self._from_rank0,
        )

    def compute(
        self, batch: StepBatch, numbers: RowNumbers | None = None, padding: Padding | None = None
    ) -> tuple[Computed, StepTensors]:
        """Compute a step's logits and expert ids, without its padding, and count the experts' tokens."""
        self.cache.copy(batch.copies)
        drawing, more = (None, ()) if numbers is None else (numbers.sampling, numbers.parts)
        how: dict[str, Any] = {"drawing": drawing, "more": more, "padding": padding}
        step = step_tensors(batch, self.cache.block_size, self.device, **how)
        with self._adapted(batch):
            found = None if self.faster is None else self.faster(step, self._forward)
            found = self._forward(step) if found is None else found
        if padding is not None and padding.num is not None:
            found = found.first(len(batch.rows))
        self._count(found.ids_of_layers)
        return found, step

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        if self.faster is not None:
            self.faster.compile_all(self._forward)

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

    def _forward(self, step: StepTensors) -> Computed:
        """Logits, expert ids and, of a padded step, drawn tokens; does not synchronize."""
        mask_T = step.token_mask
        output = self.model(
            step.ids_T,
            context=self._context(step),
            **({} if mask_T is None else {"token_mask_BS": mask_T}),
            logit_rows_R=step.rows_R,
            capacity_factor=self.model.config.moe.dropless_factor,
            losses=False,
        )
        found = Computed(output.logits_BSV, [one.topk_expert_ids_TK for one in output.stats])
        if mask_T is None or step.sampling is None:
            return found
        return found._replace(drawn_3R=drawn_of(found.logits_RV, step.sampling))

    def _context(self, step: StepTensors) -> PagedContext:
        return PagedContext(self.cache, step.positions_T, step.slots_T, step.keys)

    def _count(self, ids_of_layers: Sequence[Tensor]) -> None:
        """Add a step's choices to `expert_load`, without synchronizing."""
        if not ids_of_layers:
            return
        widths = [ids_TK.shape[1] for ids_TK in ids_of_layers]
        if widths != self._offsets[0]:
            firsts = accumulate(map(len, self.expert_load), initial=0)
            each = [first for first, width in zip(firsts, widths, strict=False) for _ in range(width)]
            self._offsets = widths, torch.tensor(each, device=self.device)
        ids = (torch.cat(list(ids_of_layers), 1) + self._offsets[1]).flatten()
        self._loads.scatter_add_(0, ids, self._ones.expand_as(ids))

    def loads(self) -> list[list[int]]:
        """`expert_load` on the host."""
        return [load.tolist() for load in self.expert_load]
