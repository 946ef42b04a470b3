"""Steps of few tokens that are recorded, one for each shape, and replayed: the model's own bits without its Python."""

import logging
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from expertmesh.costs.graph_memory import TABLE_WIDTHS
from expertmesh.cpu.recording import Recording, UnrecordableError
from expertmesh.engine.faster_forward import Computed, why_not_repeated
from expertmesh.engine.step_tensors import Padding, StepBatch, StepTensors
from expertmesh.kernels.cpu.library import loaded, num_threads
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.plain_call import runs_plainly

MOST_TOKENS = 64
"""Largest number of tokens of a step that is recorded; of more, Python's time is a small part (docs/log.md)."""
MOST_BYTES = 1 << 24
"""Largest memory of one recorded step; larger ones gain nothing."""
ALL_BYTES = 1 << 28
"""Largest memory of all recorded steps; the one that has not been used for longest goes."""
MOST_RECORDED = 128
"""Largest number of recorded steps, as the objects of each take memory, too."""
TIMES_BEFORE = 2
"""Steps of a shape up to the one that is recorded."""

_log = logging.getLogger("expertmesh.engine")
_Kind = tuple[Any, ...]
_CPU = torch.device("cpu")


@dataclass
class _Recorded:
    """A recorded step with its input and its outputs."""

    words: Tensor
    recording: Recording
    found: Computed
    is_checked: bool = False  # whether a replay, with other numbers than were recorded, was the model's

    def __call__(self, step: StepTensors) -> Computed:
        self.words.copy_(step.words)
        self.recording.replay()
        return self.found


class RecordedSteps:
    """See `expertmesh.engine.faster_forward.FasterForward`."""

    pads, description = False, ""

    def __init__(self, model: Any, block_size: int) -> None:
        self._model, self._block_size = model, block_size
        self._recorded: OrderedDict[_Kind, _Recorded] = OrderedDict()
        self._times: Counter[_Kind] = Counter()
        self._too_many = MOST_TOKENS + 1  # number of tokens from which steps are too large
        self._refusal = ""  # why a step could not be recorded
        self._look()

    def _look(self) -> None:
        """Find the tensors of the model as it is now, and forget what was recorded."""
        self._recorded.clear()
        modules = list(self._model.modules())
        self._tensors = [tensors for one in modules for tensors in (one._parameters, one._buffers)]
        self._children = [one._modules for one in modules]
        self._hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._modules, self._own = modules, [vars(one) for one in modules]
        self._structure = self._structure_now()
        self._addresses: list[int] = []
        self.problem = self._refusal or why_not_recorded(self._model)  # empty: steps are recorded

    def _structure_now(self) -> list[Any]:
        """Modules of the model with their classes, attributes and numbers of hooks."""
        children, own = (chain.from_iterable(map(dict.values, dicts)) for dicts in (self._children, self._own))
        return [*children, *map(type, self._modules), *map(len, self._hooks), *own]

    def padding(self, batch: StepBatch) -> Padding | None:
        """Widths of block tables that many steps have in common; None: the step is not recorded."""
        now = self._structure_now()
        # modules, adapters, hooks or attributes are others; by identity, as tensors are among them
        if len(now) != len(self._structure) or not all(map(is_, now, self._structure)):
            self._look()
        chunks = batch.chunks
        if self.problem or _is_watched() or not 0 < sum(len(one.ids) for one in chunks) < self._too_many:
            return None
        blocks = max(one.start + len(one.ids) - 1 for one in chunks) // self._block_size + 1
        return Padding(TABLE_WIDTHS[bisect_left(TABLE_WIDTHS, blocks)])

    def __call__(self, step: StepTensors, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """See `FasterForward`; None: this kind of step is not recorded yet."""
        if step.padding is None:
            return None
        tensors = chain.from_iterable(map(dict.values, self._tensors))
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        if addresses != self._addresses:  # weights were replaced
            self._addresses = addresses
            self._recorded.clear()
        keys = step.keys
        shape = len(step.ids_T), len(keys.num_keys_B), len(step.rows_R), keys.most_queries, step.padding.width
        kind = (*shape, num_threads(), self._model.training, torch.is_inference_mode_enabled())
        known = self._recorded.get(kind)
        if known is None:
            self._times[kind] += 1
            return self._record(kind, step, forward) if self._times[kind] >= TIMES_BEFORE else None
        self._recorded.move_to_end(kind)
        if known.is_checked:
            return known(step)
        expected = forward(step)
        known.is_checked = _are_equal(known(step), expected)
        if not known.is_checked:
            self._gives_up("a replay of a step is not the step")
        return expected

    def compile_all(self, forward: Callable[[StepTensors], Computed]) -> None:
        """Do nothing: a step is recorded while it is computed."""

    def _record(self, kind: _Kind, step: StepTensors, forward: Callable[[StepTensors], Computed]) -> Computed | None:
        """Compute a step and record it; None: it cannot be recorded."""
        recording, words = Recording(), step.words.clone()
        own = step.on(words)
        try:
            found = recording.record(lambda: forward(own))
        except UnrecordableError as error:
            self._gives_up(str(error))
            return None
        if recording.num_bytes > MOST_BYTES:
            self._too_many = len(step.ids_T)
            _log.info(
                "steps of %d tokens or more are not recorded: one takes %.1f MiB, more than %d",
                self._too_many,
                recording.num_bytes / 2**20,
                MOST_BYTES >> 20,
            )
            return found
        self._recorded[kind] = _Recorded(words, recording, found)
        while (
            len(self._recorded) > MOST_RECORDED
            or sum(one.recording.num_bytes for one in self._recorded.values()) > ALL_BYTES
        ):
            self._times.pop(self._recorded.popitem(last=False)[0], None)
        return found

    def _gives_up(self, problem: str) -> None:
        self.problem = self._refusal = problem
        self._recorded.clear()
        _log.warning("the engine's steps are not recorded: %s", problem)


def _is_watched() -> bool:
    """Whether somebody wants to see every step: a dispatch mode (counters of FLOPs), a transform, hooks of all modules;
    or autocast, which keeps casts of weights that later steps would find again though the weights have changed."""
    return bool(not runs_plainly() or _has_any_global_hook() or autocast_dtype(_CPU))


def _are_equal(one: Computed, other: Computed) -> bool:
    """Whether results have the same bits, or NaN in the same places."""
    pairs = zip((one.logits_RV, *one.ids_of_layers), (other.logits_RV, *other.ids_of_layers), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def why_not_recorded(model: Any) -> str:
    """Reason why a model's steps cannot be recorded, as a continuation of "compile=True"; empty: they can."""
    if problem := why_not_repeated(model):
        return problem
    parameters = list(model.parameters())
    if not all(p.is_cpu for p in parameters):
        return "is for models on a CPU"
    if loaded().kernels is None:
        return "needs the kernels in C, which are not here"
    if any(type(p) is not torch.nn.Parameter for p in parameters) or any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in model.modules()
    ):
        return "is for plain models: no parameter of another class, no hook"
    if any(getattr(module, "adapters", None) is not None for module in model.modules()):
        return "is for models without adapters"
    return ""
