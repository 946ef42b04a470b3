"""Decode steps that are captured as graphs on a GPU, one for each padded size, and replayed: no launch by the host.

A step whose sequences have one token each is padded to the next size; its numbers are copied into the graph's input,
and logits, expert ids and drawn tokens are read from the graph's outputs. Padding has no keys, writes to a page of its
own, and chooses no expert. Prompts are not captured.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.costs.graph_memory import captured_bytes, captured_sizes, captured_widths
from expertmesh.engine.drawing import SamplingNumbers
from expertmesh.engine.faster_forward import Computed, FasterForward, why_not_repeated
from expertmesh.engine.request_adapters import detach_collected
from expertmesh.engine.step_tensors import Padding, StepBatch, StepTensors, step_tensors
from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer
from expertmesh.ops.backend import runs_triton

OPTIONAL = "expertmesh.cpu"
"""Package that may be missing; everything is computed without it, more slowly."""

_log = logging.getLogger("expertmesh.engine")
_Kind = tuple[Padding, bool, bool]
"""Sizes of a step, whether all rows are greedy, and whether none has a filter."""
_SAMPLINGS = ((True, True), (False, True), (False, False))


class CudaGraphs:
    """Graphs of a GPU, which share one pool of memory; replays follow each other, so that they may overwrite its
    tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self) -> "CudaGraph":
        """A graph, still empty."""
        return CudaGraph(self._device, self._pool)

    def num_bytes(self) -> int:
        """Bytes of the device that PyTorch has reserved."""
        return torch.cuda.memory_reserved(self._device)


class CudaGraph:
    """Work of a GPU that is recorded once and replayed on the same memory."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._pool, self._graph = device, pool, torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Computed]) -> Computed:
        """Record what a function does; returns its outputs, which every replay overwrites."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels, and lets libraries take their workspaces
                compute()
            torch.cuda.current_stream().wait_stream(stream)
            # other threads may use the device meanwhile
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                return compute()

    def replay(self) -> None:
        """Do it again; does not wait."""
        self._graph.replay()


@dataclass(frozen=True)
class _Captured:
    """A graph with its input and its outputs."""

    words: Tensor
    graph: CudaGraph
    found: Computed


class CapturedSteps:
    """Decode steps as graphs, captured when the first of a kind comes, or all by `compile_all`."""

    pads = True

    def __init__(
        self,
        *,
        num_blocks: int,  # blocks of the cache; the padding's page is behind them
        block_size: int,  # tokens of a block
        max_len: int,  # maximum tokens of a sequence
        most_tokens: int,  # maximum number of tokens of a decode step
        device: torch.device,  # device of the model
        graphs: Any,  # makes empty graphs
        num_layers: int = 1,  # layers of the model
        vocab_size: int = 0,  # tokens of the vocabulary
    ) -> None:
        self._block_size, self._device, self._graphs = block_size, device, graphs
        self._spare_slot = num_blocks * block_size
        self._sizes = captured_sizes(most_tokens)
        self._widths = captured_widths(-(-max_len // block_size))
        self._captured: dict[_Kind, _Captured] = {}
        self.num_bytes = 0  # bytes that the captured steps take of the device, as PyTorch counts them
        sizes = {"num_layers": num_layers, "vocab_size": vocab_size, "num_blocks": self._widths[-1]}
        # bytes that they take once all are captured, as the planner counts them
        self.planned_bytes = captured_bytes(most_tokens, **sizes)

    @property
    def description(self) -> str:
        """Captured steps and the memory for them, in words."""
        most, gib = self._sizes[-1], self.planned_bytes / 2**30
        return f"decode steps of up to {most} tokens are captured as graphs, about {gib:,.2f} GiB"

    def padding(self, batch: StepBatch) -> Padding | None:
        """See `FasterForward`; None: the step is none of decoding, or too large."""
        num = len(batch.chunks)
        is_decoding = batch.rows == tuple(range(num)) and all(len(one.ids) == 1 for one in batch.chunks)
        if not num or not is_decoding or num > self._sizes[-1]:
            return None
        blocks = max(one.start // self._block_size + 1 for one in batch.chunks)
        place = bisect_left(self._widths, blocks)
        size = self._sizes[bisect_left(self._sizes, num)]
        return Padding(self._widths[place], size, self._spare_slot)

    def __call__(self, step: StepTensors, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """See `FasterForward`; None: the step is not padded."""
        if step.padding is None or step.sampling is None:
            return None
        all_greedy = step.sampling.all_greedy
        kind = step.padding, all_greedy, all_greedy or step.sampling.none_filters
        if kind not in self._captured:
            self._capture([kind], forward)
        known = self._captured[kind]
        known.words.copy_(step.words)
        known.graph.replay()
        return known.found

    @torch.no_grad()
    def compile_all(self, forward: Callable[[StepTensors], Computed]) -> None:
        """Capture every kind of step."""
        pads = [Padding(w, n, self._spare_slot) for n, w in product(self._sizes, self._widths)]
        # the largest first: the others find their memory in its pool
        kinds = [(pad, *one) for one in reversed(_SAMPLINGS) for pad in reversed(pads)]
        self._capture([kind for kind in kinds if kind not in self._captured], forward)

    def _capture(self, kinds: Iterable[_Kind], forward: Callable[[StepTensors], Computed]) -> None:
        began, before, num = time.perf_counter(), self._graphs.num_bytes(), len(self._captured)
        for kind in kinds:
            self._captured[kind] = self._one(kind, forward)
        self.num_bytes += self._graphs.num_bytes() - before
        _log.info(
            "captured %d kinds of decode steps in %.1f s; all take %.1f MiB",
            len(self._captured) - num,
            time.perf_counter() - began,
            self.num_bytes / 2**20,
        )

    def _one(self, kind: _Kind, forward: Callable[[StepTensors], Computed]) -> _Captured:
        """Graph of a kind, captured with a step of padding alone, which changes nothing."""
        padding, all_greedy, none_filters = kind
        one = SamplingNumbers.of((), seeds=(), answers=(), positions=(), num_rows=padding.num)
        step = step_tensors(
            StepBatch((), ()),
            self._block_size,
            self._device,
            drawing=SamplingNumbers(one.parts, all_greedy, none_filters),
            padding=padding,
        )
        graph = self._graphs()
        # views of their own in each pass: what is computed from them belongs to the graph
        found = graph.capture(lambda: forward(step.on(step.words)))
        return _Captured(step.words, graph, found)


def why_not_captured(model: Any) -> str:
    """Reason why a model's decode steps cannot be captured, as a continuation of "compile=True"; empty: they can."""
    if problem := why_not_repeated(model):
        return problem
    if not runs_triton(model.device):
        return "needs a GPU with Triton here"
    if any(isinstance(module, MoELayer) and module.grouped is None for module in model.modules()):
        return "is for stacked experts, which have fixed bounds"
    return ""


def fastest_forward(model: Any, config: EngineConfig, *, num_blocks: int, max_len: int) -> FasterForward | None:
    """Captured steps on a GPU, recorded steps elsewhere, of which there is none yet; None: they are not wanted, or not
    possible."""
    if config.compile is False:
        return None
    detach_collected(model)
    recorded: Any = None
    if model.device.type == "cuda":
        problem = why_not_captured(model)
    elif find_spec(OPTIONAL) is None:
        problem = f"needs the package {OPTIONAL}, which is not here"
    else:
        recorded = import_module(f"{OPTIONAL}.recorded_steps")
        problem = recorded.why_not_recorded(model)
    if problem and config.compile:
        raise ConfigError("compile", True, problem, "leave it out")
    if problem:
        return None
    if recorded is not None:
        steps: FasterForward = recorded.RecordedSteps(model, config.block_size)
        return steps
    return CapturedSteps(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_len=max_len,
        most_tokens=min(config.max_sequences * (1 + config.num_draft_tokens), config.token_budget),
        device=model.device,
        graphs=CudaGraphs(model.device),
        num_layers=model.config.num_layers,
        vocab_size=model.vocab_size,
    )
