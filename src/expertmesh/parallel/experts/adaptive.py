"""Adaptive dispatch: a tuner chooses the dispatch options of sharded layers from measured times.

A trial measures the layer's forward and backward on each rank. Its sum over ranks travels with the counts of a later
call, so all ranks report the same number and decide alike. Once all loads that occur are settled, nothing is measured
or sent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expertmesh.comm.collectives import all_gather
from expertmesh.comm.mesh import divisors
from expertmesh.config.dispatch_options import AllToAll, DispatchOptions
from expertmesh.costs.communication import Network, RouteShape
from expertmesh.costs.layer_time import LayerShape, Machine
from expertmesh.moe.dispatch import Dispatched
from expertmesh.moe.layer import MoELayer
from expertmesh.ops.activation import num_branches
from expertmesh.parallel.experts.load_record import route_shape
from expertmesh.parallel.experts.route_split import make_split
from expertmesh.parallel.experts.tuner import (
    OVERLAP_DEGREES,
    Bucket,
    Choices,
    Effort,
    ModelSearch,
    Trial,
    Tuner,
)

REPLICATED = (0, 1, 2)
EFFORT = Effort()
PROBE_ROWS, PROBE_S = 256, 0.03
MEMORY_SHARE = 0.5
"""Share of the free memory, after weights, gradients and optimizer state, that the layers may use."""


class Stopwatch:
    """Time spans of one call; on a GPU measured by events without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = [self._now()]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        """Mark the end of a span, or the start of the next."""
        self._marks.append(self._now())

    def seconds(self) -> float:
        """Sum of all spans."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
        if not self._on_gpu:
            result: float = sum(end - start for start, end in pairs)
            return result
        self._marks[-1].synchronize()
        other: float = sum(start.elapsed_time(end) for start, end in pairs) / 1e3
        return other


class LayerChooser:
    """Chooses dispatch options for one layer, alike on all ranks.

    Args:
        num_ranks: W, ranks that hold its experts.
        world_size: number of ranks over which times are averaged.
    """

    def __init__(self, tuner: Tuner, *, num_ranks: int, world_size: int) -> None:
        self.tuner, self._num_ranks, self._world_size = tuner, num_ranks, world_size
        self._trial: Trial | None = None
        self._done: list[tuple[Trial, Stopwatch]] = []
        self._sent: Trial | None = None

    def choose(self, dispatcher: Any, top_k: int, capacity_factor: float | None) -> DispatchOptions:
        """All dispatch options of the call that begins."""
        load = dispatcher.load.token_load(top_k, capacity_factor)
        self._trial = None
        if load is None:
            usual: DispatchOptions = dispatcher.usual
            return _plain(usual)
        bucket = Bucket.of(
            load,
            num_ranks=self._num_ranks,
            trains=torch.is_grad_enabled(),
            capacity_factor=capacity_factor,
        )
        options, self._trial = self.tuner.choose(load, bucket)
        return options

    def timed(self, tokens: Dispatched) -> tuple[Dispatched, Callable[[Tensor], None] | None]:
        """Tokens whose gradient ends the timing of this call, and a callback for its result; None: the call is no
        trial."""
        trial, self._trial = self._trial, None
        if trial is None:
            return tokens, None
        x_TD, watch = tokens.x_TD, Stopwatch(tokens.x_TD.device)
        has_backward = x_TD.requires_grad and torch.is_grad_enabled()
        if has_backward:
            x_TD = x_TD.view_as(x_TD)
            x_TD.register_hook(lambda _: self._end(trial, watch))

        def over(y_TD: Tensor) -> None:
            watch.mark()
            if has_backward and y_TD.requires_grad:
                y_TD.register_hook(lambda _: watch.mark())
            else:
                self._done.append((trial, watch))

        return replace(tokens, x_TD=x_TD), over

    def _end(self, trial: Trial, watch: Stopwatch) -> None:
        watch.mark()
        self._done.append((trial, watch))

    def to_agree_on(self) -> list[int]:
        """Microseconds of the oldest finished trial; empty if there is none."""
        if not self._done:
            return []
        self._sent, watch = self._done.pop(0)
        return [round(watch.seconds() * 1e6)]

    def agreed(self, sums: Tensor) -> None:
        """Report the sum over ranks of the last `to_agree_on` to the tuner."""
        assert self._sent is not None
        self.tuner.report(self._sent, int(sums[0]) / 1e6 / self._world_size)


def _routes(dispatcher: Any, pinned: int | None) -> dict[int, RouteShape]:
    degrees = dispatcher.storage.degrees
    W = degrees.num_ranks
    allowed = divisors(W) if pinned is None else [pinned]
    nodes = dispatcher.nodes
    return {r: route_shape(make_split(degrees, r), nodes) for r in allowed}


def layer_shape(layer: MoELayer, *, num_ranks: int, num_gathers: int, num_layers: int) -> LayerShape:
    """Shape of one of `num_layers` layers for the cost model; element_bytes is the size of its parameters' dtype."""
    experts = layer.grouped
    assert experts is not None
    _, branches, hidden_dim, dim = experts.shape
    size = experts.w_in.element_size()
    return LayerShape(
        num_experts=layer.num_experts,
        dim=dim,
        hidden_dim=hidden_dim,
        num_matrices=num_branches(experts.activation) + 1,
        element_bytes=size,
        gradient_bytes=max(size, 4),
        num_ranks=num_ranks,
        num_gathers=num_gathers,
        num_layers=num_layers,
    )


def may_choose(layer: MoELayer) -> bool:
    """Whether a layer has several dispatch options: grouped experts without adapters."""
    return layer.grouped is not None and layer.grouped.adapters is None


def adapt(
    layers: Sequence[MoELayer],  # sharded layers; those without a choice (`may_choose`) keep their options
    pinned: DispatchOptions,  # options that are fixed
    network: Network,  # the links
    *,
    num_gathers: int,  # gathers of the weights per step, see `LayerShape`
    resting_bytes: float = 0.0,  # memory that the model will still allocate permanently on this rank
    known: Mapping[str, DispatchOptions] | None = None,  # settled plans, by shape and bucket
    on_settled: Any = None,  # called with all settled plans when there is a new one
) -> None:
    """Let sharded layers choose their dispatch options; every rank must call, with equal arguments."""
    tuners: dict[tuple[LayerShape, int | None], Tuner] = {}
    settled: dict[str, DispatchOptions] = dict(known or {})
    probe: tuple[float, float] | None = None
    grouped = [layer for layer in layers if may_choose(layer)]
    for layer in grouped:
        dispatcher: Any = layer.dispatcher
        storage = dispatcher.storage
        W, world = storage.degrees.num_ranks, storage.world
        if probe is None:
            sharing = _sharing_memory(world.device_type, dispatcher.nodes)
            free = _free_bytes(world.device_type) / sharing - resting_bytes
            free = _agreed_least(world, max(free, 0.0))
            probe = _agreed_least(world, _flops_per_s(layer)), free
        shape = layer_shape(layer, num_ranks=W, num_gathers=num_gathers, num_layers=len(grouped))
        key = shape, pinned.route_degree and dispatcher.usual.route_degree
        if key not in tuners:
            is_free = pinned.route_degree is None
            routes = _routes(dispatcher, None if is_free else dispatcher.usual.route_degree)
            kinds: Sequence[AllToAll] = ("flat", "hierarchical")
            choices = Choices(
                routes,
                OVERLAP_DEGREES if pinned.overlap_degree is None else (pinned.overlap_degree,),
                kinds if pinned.all_to_all in (None, "auto") else (pinned.all_to_all,),
                REPLICATED if pinned.replicated_experts is None else (pinned.replicated_experts,),
                _plain(dispatcher.usual),
                probe[1] * MEMORY_SHARE,
            )
            tuners[key] = _new_tuner(shape, choices, Machine(network, probe[0]), settled, on_settled)
        dispatcher.chooser = LayerChooser(tuners[key], num_ranks=W, world_size=world.size)


def _new_tuner(
    shape: LayerShape,
    choices: Choices,
    machine: Machine,
    settled: dict[str, DispatchOptions],
    on_settled: Any,
) -> Tuner:
    name = f"E{shape.num_experts}-D{shape.dim}-F{shape.hidden_dim}-W{shape.num_ranks}:"

    def note(found: Mapping[str, DispatchOptions]) -> None:
        settled.update({name + key: dispatch for key, dispatch in found.items()})
        if on_settled is not None:
            on_settled(settled)

    mine = {k.removeprefix(name): dispatch for k, dispatch in settled.items() if k.startswith(name)}
    fitting = {k: dispatch for k, dispatch in mine.items() if choices.allow(dispatch)}
    search = ModelSearch(choices, shape, machine)
    return Tuner(search, known=fitting, on_settled=note, effort=EFFORT)


def _plain(usual: DispatchOptions) -> DispatchOptions:
    """Options with all_to_all="auto" replaced by "flat"."""
    return replace(usual, all_to_all="flat") if usual.all_to_all == "auto" else usual


def _sharing_memory(device_type: str, nodes: Sequence[int]) -> int:
    """Number of ranks that share one memory: 1 on GPUs, else the most ranks of a node."""
    return 1 if device_type == "cuda" else max(map(nodes.count, set(nodes)))


def _agreed_least(world: Any, mine: float) -> float:
    """Minimum of a value over all ranks."""
    number = torch.tensor([mine], dtype=torch.float64, device=world.device_type)
    return float(all_gather(number, world.all_ranks(), where="speed and memory of ranks").min())


def _flops_per_s(layer: MoELayer) -> float:
    """Measured matmul speed at the experts' sizes, while all ranks of the machine measure it and share its cores."""
    experts = layer.grouped
    assert experts is not None
    _, branches, F, D = experts.shape
    device = experts.compute_device or experts.w_in.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(PROBE_ROWS, D, device=device, dtype=experts.w_in.dtype)
    w = torch.ones(D, branches * F, device=device, dtype=experts.w_in.dtype)
    x @ w
    count, seconds = 0, 0.0
    while seconds < PROBE_S:
        watch = Stopwatch(device)
        x @ w
        watch.mark()
        count, seconds = count + 1, seconds + max(watch.seconds(), 1e-9)
    return count * 2 * PROBE_ROWS * D * branches * F / seconds


def _free_bytes(device_type: str) -> float:
    """Free memory of this rank's device, or of the host."""
    if device_type == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            free = next(line for line in lines if line.startswith("MemAvailable"))
        return float(free.split()[1]) * 1024
    except (OSError, StopIteration):
        return float("inf")
