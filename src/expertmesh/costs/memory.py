"""Memory of a rank in training, by part, at the peak of a step: what `plan` and `train --dry-run` print."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from expertmesh.costs.rank_layout import OURS, RankLayout, Stage, Workload
from expertmesh.costs.sizes import Activations
from expertmesh.costs.state_bytes import OTHERS
from expertmesh.spec.model_spec import ModelSpec, Parameter, num_elements
from expertmesh.spec.moments import moment_bytes
from expertmesh.spec.resting import WIDENED_BYTES

GIB = 2**30
CONTEXT_BYTES = 0.5 * GIB
"""Bytes of a CUDA context and its kernels."""
NCCL_BYTES = 0.37 * GIB
"""Bytes of the buffers of one set of communicators (ai-dynamo/aiconfigurator: 342 to 392 MiB)."""
FRAGMENTS = 0.05
"""Fragmentation as a share of live bytes, with expandable segments; three times as much without (docs/planner.md)."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank at the peak of a step, on the device and on the host."""

    weights_bytes: float  # parameters between steps
    gradients_bytes: float
    optimizer_bytes: float  # moments and master copies
    # whole dense weights beside the parts, and their whole gradients where a step keeps them
    gathered_dense_bytes: float
    gathered_experts_bytes: float  # gathered expert weights
    copies_bytes: float  # copies of weights in the compute dtype on a single rank, and of offloaded experts
    activations_bytes: float  # activations kept for the backward
    dispatch_bytes: float  # rows in dispatch, and masks of one-hot dispatch
    logits_bytes: float  # logits with their gradient
    communication_bytes: float  # a GPU's context and buffers of collectives
    allowance_bytes: float  # a GPU's fragmentation
    reused_bytes: float  # memory counted twice above: logits are freed before a layer is recomputed
    host_bytes: float  # offloaded states of one rank
    checkpoint_bytes: float  # a rank's part of a checkpoint, which one copy of the model writes

    @property
    def live_bytes(self) -> float:
        """Bytes of tensors, as `torch.cuda.max_memory_allocated` shows them."""
        beside = {"communication", "allowance"}
        result: float = sum(getattr(self, f"{name}_bytes") for name in _WORDS.keys() - beside) - self.reused_bytes
        return result

    @property
    def device_bytes(self) -> float:
        """Bytes that the device must have in all."""
        return self.live_bytes + self.communication_bytes + self.allowance_bytes

    @property
    def states_bytes(self) -> float:
        """Bytes held between steps: weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def parts(self) -> list[tuple[str, float]]:
        """(words, bytes) of the device's parts without zeros; reused memory is negative."""
        found = {words: getattr(self, f"{name}_bytes") for name, words in _WORDS.items()}
        found["reused"] = -self.reused_bytes
        return [(words, size) for words, size in found.items() if size]


_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered_dense": "gathered dense weights",
    "gathered_experts": "gathered experts",
    "copies": "compute copies",
    "activations": "activations",
    "dispatch": "dispatch",
    "logits": "logits",
    "communication": "context, buffers",
    "allowance": "fragments",
}


class Trained(Protocol):
    """A model to train: its parameters and its activations."""

    @property
    def spec(self) -> ModelSpec:
        """Parameters of the model."""

    def activations(self, layout: RankLayout, work: Workload) -> Activations:
        """Activations of the model on a rank."""


def peak_memory(model: Trained, layout: RankLayout, work: Workload, *, stage: Stage = "most") -> PeakMemory:
    """Peak memory of the rank that has most. `stage`: pipeline stage of the rank; "most": the one that has most."""
    if stage == "most":
        ends: tuple[Stage, ...] = ("first", "last") if layout.pp_degree > 1 else ("last",)
        each = (peak_memory(model, layout, work, stage=end) for end in ends)
        return max(each, key=lambda memory: memory.device_bytes)
    states, gathered = _weights(model.spec, _of_weights(layout), work)
    flight, stages = _in_flight(layout, stage), layout.pp_degree
    found = model.activations(layout, work)
    if stages > 1 and stage == "first":
        found = replace(found, logits=0.0)
    held = dict.fromkeys(states._fields, 0.0) if layout.offload else states._asdict()
    memory = PeakMemory(
        **held,
        **gathered._asdict(),
        activations_bytes=found.kept * flight / stages + found.recomputed,
        dispatch_bytes=found.dispatch,
        logits_bytes=found.logits,
        communication_bytes=0.0,
        allowance_bytes=0.0,
        reused_bytes=min(found.logits, found.recomputed + found.dispatch),
        host_bytes=sum(states) if layout.offload else 0.0,
        checkpoint_bytes=states.weights_bytes + states.optimizer_bytes,
    )
    if not work.on_gpu:
        return memory
    buffers = CONTEXT_BYTES + NCCL_BYTES * (1 + (layout.num_ranks > 1))
    fragments = FRAGMENTS * memory.live_bytes
    return replace(memory, communication_bytes=buffers, allowance_bytes=fragments)


def _in_flight(layout: RankLayout, stage: Stage) -> float:
    """Passes whose activations a pipeline stage keeps at once (Megatron's 1F1B, interleaved where stages are
    virtual)."""
    stages, virtual = layout.pp_degree, layout.virtual_stages
    after = stages - 1 if stage == "first" else 0
    chunks = after + 1 if virtual == 1 else 2 * after + (virtual - 1) * stages + 1
    return min(chunks / virtual, layout.accumulation) if stages > 1 else 1.0


class _States(NamedTuple):
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float


class _Gathered(NamedTuple):
    gathered_dense_bytes: float = 0.0
    gathered_experts_bytes: float = 0.0
    copies_bytes: float = 0.0


def _of_weights(layout: RankLayout) -> RankLayout:
    """The layout without what weights and states do not depend on."""
    usual = {"checkpointing": "none", "recomputed": (), "overlap_degree": 1, "all_to_all": "flat"}
    usual["micro_batch"] = 1
    return replace(layout, **usual, accumulation=min(layout.accumulation, 2))  # type: ignore[arg-type]


@lru_cache(maxsize=8192)
def _weights(spec: ModelSpec, layout: RankLayout, work: Workload) -> tuple[_States, _Gathered]:
    """Bytes of the states of a rank, and of gathered weights; a search asks for many batches of each layout."""
    return _states(spec, layout, work), _gathered(spec, layout, work)


def _states(spec: ModelSpec, layout: RankLayout, work: Workload) -> _States:
    """Bytes of the states, tensor by tensor; see docs/parallelism.md, "Memory"."""
    W, tp, stages = (
        layout.stage_ranks // layout.dp_replicate_degree,
        layout.tp_degree,
        layout.pp_degree,
    )
    found = [0.0, 0.0, 0.0]
    for one, count in spec.alike:
        part = whole = _part(one, W, layout.shard_degree, tp, layout.es_degree)
        if one.rests is not None:
            # over ranks what rests is FP32
            width = work.element_bytes if layout.num_ranks == 1 else work.master_bytes
            found[0] += count * one.rests.num_bytes(part, element_bytes=width) / stages
            continue
        if (other := OTHERS.get(work.states)) is None:
            sizes = work.master_bytes, work.master_bytes
            moments = _moments_bytes(one, part, work)
        else:
            sizes, moments = (other.weight, other.gradient), other.optimizer * math.prod(part)
            if not other.shards_weights:
                whole = _part(one, layout.route_degree, 1, tp, layout.es_degree)
        each = *(size * math.prod(whole) for size in sizes), moments
        found = [sum_ + count * size / stages for sum_, size in zip(found, each, strict=True)]
    return _States(*found)


def _widened_bytes(one: Parameter, work: Workload) -> int:
    """Bytes of a resting matrix that is widened for a product, of routed experts one or some at a time."""
    if one.rests is None or not one.rests.is_packed:
        return 0
    experts, whole = 1 if one.expert_axis is None else one.shape[one.expert_axis], one.num_elements * work.element_bytes
    return min(whole, max(4 * whole // experts, WIDENED_BYTES)) if work.on_gpu else whole // experts


def _moments_bytes(one: Parameter, part: Sequence[int], work: Workload) -> int:
    """Bytes of the moments of a part of a parameter: two of AdamW, one of a matrix that Muon updates."""
    number = 1 if work.optimizer == "muon" and one.is_matrix else 2
    return number * moment_bytes(one.shape, part, OURS[work.states], master=work.master_bytes)


def _gathered(spec: ModelSpec, layout: RankLayout, work: Workload) -> _Gathered:
    """Bytes of gathered weights: two layers at a time where each use gathers, all layers where a step keeps them."""
    b, stages, other = work.element_bytes, layout.pp_degree, OTHERS.get(work.states)
    if other is not None and not other.shards_weights:
        return _Gathered()
    widened = max((_widened_bytes(one, work) for one in spec if one.rests), default=0)
    if layout.stage_ranks == 1:  # autocast's copies
        rounds = other is None and b < work.master_bytes
        learn = num_elements(one for one in spec if one.rests is None)
        return _Gathered(copies_bytes=learn / stages * b * rounds + widened)
    outside, dense, experts = _whole(spec, layout.tp_degree, b, work.master_bytes)
    W, keeps = layout.stage_ranks // layout.dp_replicate_degree, layout.zero_stage < 3
    # FSDP2 copies a layer's weights even where nothing is sharded.
    most = sum(dense) / stages if keeps else _most_at_once(dense, 1 + (layout.shard_degree > 1))
    elements = sum(cut + (whole if cut < whole else 0) for cut, whole in outside) + most
    dense_bytes = elements * work.gathered_bytes
    if layout.zero_stage == 1 and layout.accumulation > 1 and layout.shard_degree > 1:
        whole = sum(dense) / stages + sum(cut for cut, _ in outside)
        dense_bytes += whole * work.master_bytes
    routes = [layout.route_of(index) for index in range(len(experts))]
    layers = list(zip(experts, routes, spec.num_experts, strict=True))
    shares = [0.0 if route == W else size / route for size, route, _ in layers]
    at_once = sum(shares) / stages if keeps else _most_at_once(shares, 2)
    at_once += layout.replicated_experts * sum(size / number for size, route, number in layers if route > 1)
    copies = float(widened)
    if layout.offload:  # copies of two layers' own experts, and the gradient of one
        own = [size / W for size, route, _ in layers if route == W]
        copies += max(own, default=0.0) * (2 + work.master_bytes / b)
    return _Gathered(dense_bytes, at_once, copies)


@lru_cache(maxsize=64)
def _whole(
    spec: ModelSpec, tp: int, element_bytes: int, master_bytes: int
) -> tuple[list[tuple[int, int]], list[int], list[float]]:
    """(elements of a rank, of all) of parameters outside the layers; a rank's dense elements by layer; experts' bytes
    by MoE layer."""
    outside, dense, experts = [], [], []
    for layer, ones in spec.layers.items():
        cut = [
            (one.num_elements // (1 if _tensor_axis(one, tp) is None else tp), one.num_elements)
            for one in ones
            if not one.is_expert
        ]
        if layer is None:
            outside = cut  # cut for storage only: their user gathers them
            continue
        dense.append(sum(elements for elements, _ in cut))
        if any(one.is_expert for one in ones):
            each = (_gathered_bytes(one, element_bytes, master_bytes) for one in ones)
            experts.append(sum(each))
    return outside, dense, experts


def _gathered_bytes(one: Parameter, element_bytes: int, master_bytes: int) -> float:
    """Bytes of a gathered parameter of experts: packed ones travel as codes, with the scales that ranks hold; 0 of
    others."""
    if not one.is_expert:
        return 0.0
    if one.rests is None or not one.rests.is_packed:
        return float(one.num_elements * element_bytes)
    return one.rests.num_bytes(one.shape, element_bytes=master_bytes)


def _most_at_once(sizes: Sequence[float], number: int) -> float:
    """Largest sum of `number` neighbouring sizes."""
    return max((sum(sizes[i : i + number]) for i in range(len(sizes))), default=0)


def _tensor_axis(one: Parameter, tp: int) -> int | None:
    axis = one.tensor_axis
    return axis if axis is not None and tp > 1 and one.shape[axis] % tp == 0 else None


def _part(one: Parameter, num_ranks: int, dp_shard: int, tp: int, es_degree: int | None) -> list[int]:
    """Sizes of a parameter's part on the rank that has most.

    Of experts, which `num_ranks` share, E is cut; where ranks are left, F, or the last axis of one without F. Of
    others, the first axis that dp_shard divides is cut; where there is none, the first axis, in pieces of ceil(size /
    dp_shard).
    """
    local = list(one.shape)
    if one.expert_axis is not None:
        slices = es_degree or RankLayout.slices(local[one.expert_axis], num_ranks)
        local[one.expert_axis] //= num_ranks // slices
        sliced = one.axes.index("hidden") if "hidden" in one.axes else len(local) - 1
        local[sliced] //= slices
        return local
    if (taken := _tensor_axis(one, tp)) is not None:
        local[taken] //= tp
    free = [axis for axis in range(len(local)) if axis != taken]
    cut = next((axis for axis in free if local[axis] % dp_shard == 0), 0)
    local[cut] = -(-local[cut] // dp_shard)
    return local
