"""What the ranks of `benchmarks.distributed_layer` do: build the layers, check them against one process, time a
round."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from benchmarks.layer import FAR_OFF
from benchmarks.layer_peers import Case, DeepSpeedMoE, EinsumMoE, make_layer
from benchmarks.peer_parts import choose
from tests.oracle.numerics import assert_two_times
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh import MoELayer
from expertmesh.comm.world import World
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.training.heap import keep_freed_memory

OURS, DROPLESS, CAPACITY = "expertmesh", "DeepSpeed MoE, dropless", "DeepSpeed MoE, capacity 1.0"
NUM_BATCHES = 5


@dataclass(frozen=True)
class Workload:
    """One cell of the table.

    Attributes:
        case: shape per rank, activation, dtype.
        imbalance: rows of the fullest expert over the mean, of all tokens; None: as random tokens come.
        peers: names of DeepSpeed's forms to time beside ours.
    """

    case: Case
    imbalance: float | None
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One step of one contender on one rank: forward and backward, router included.

    Attributes:
        cpu_s: user and system time of the rank's process, threads of gloo included.
        wall_s: from a barrier to the end of the step.
        sent_bytes: rows handed to other ranks.
        dropped: share of the (token, choice) rows that no expert saw.
    """

    cpu_s: float
    wall_s: float
    sent_bytes: int
    dropped: float


@dataclass(frozen=True)
class _Contender:
    module: nn.Module
    call: Callable[[Tensor], Tensor]
    sent: Callable[[], tuple[int, float]]


@functools.cache
def _world() -> World:
    return World()


def _spread(layer: MoELayer) -> MoELayer:
    if dist.get_world_size() > 1:
        spread_experts(layer, _world())
    return layer


def _deepspeed(case: Case, *, drop_tokens: bool) -> DeepSpeedMoE:
    return DeepSpeedMoE(make_layer(case), case, drop_tokens=drop_tokens)


def shift_for(imbalance: float | None, layer: MoELayer, case: Case) -> Tensor:
    """A vector (D,) that, added to random tokens, gives the routing this imbalance."""
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(case.dim, generator=generator)
    if imbalance is None:
        return torch.zeros_like(direction)
    x_TD = torch.randn(1 << 14, case.dim, generator=generator)
    low, high = 0.0, 4.0
    for _ in range(20):
        middle = (low + high) / 2
        _, ids_TK = choose(x_TD + middle * direction, layer.router.proj.weight, case.top_k)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=case.num_experts)
        is_even = counts_E.max() * case.num_experts < imbalance * counts_E.sum()
        low, high = (middle, high) if is_even else (low, middle)
    return low * direction


@functools.lru_cache(maxsize=1)
def _prepared(work: Workload) -> tuple[dict[str, _Contender], list[Tensor], Tensor]:
    """Contenders, batches of this rank and a gradient of the output."""
    torch.manual_seed(0)
    case = work.case
    whole = make_layer(case)
    shift = shift_for(work.imbalance, whole, case)
    layer = _spread(make_layer(case))
    found = {OURS: _Contender(layer, lambda x: layer(x)[0], lambda: (0, 0.0))}
    for name in work.peers:
        moe = _deepspeed(case, drop_tokens=name == CAPACITY)
        found[name] = _Contender(moe, moe, moe.moved)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    batches = [
        (torch.randn(case.num_tokens, case.dim, generator=generator) + shift).to(case.dtype) for _ in range(NUM_BATCHES)
    ]
    return (
        found,
        batches,
        torch.randn(case.num_tokens, case.dim, generator=generator).to(case.dtype),
    )


def one_round(work: Workload, number: int) -> dict[str, Sample]:
    """Time each contender once, after a step that is not timed; they take turns in being the first."""
    keep_freed_memory()
    found, batches, grad = _prepared(work)
    names = [*found]
    samples = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        contender = found[name]

        def step(batch: Tensor, contender: _Contender = contender) -> None:
            contender.module.zero_grad(set_to_none=True)
            contender.call(batch.detach().requires_grad_()).backward(grad)

        with _world().traffic.logged() as log:
            step(batches[(number + 1) % NUM_BATCHES])
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        step(batches[number % NUM_BATCHES])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        dist.barrier()
        contender.module.zero_grad(set_to_none=True)
        sent, dropped = contender.sent()
        samples[name] = Sample(cpu, wall, sent + log.num_bytes(collective="all_to_all"), dropped)
    return samples


def imbalance_of(work: Workload) -> float:
    """Rows of the fullest expert over the mean, of all ranks' first batches."""
    found, batches, _ = _prepared(work)
    with torch.no_grad():
        counts_E = found[OURS].module(batches[0])[1].num_tokens_per_expert_E
    return float(counts_E.max() * len(counts_E) / counts_E.sum())


def check(work: Workload) -> None:
    """Compare ours, spread, with one process and FP64, and DeepSpeed's with FP64, at a smaller size.

    Raises:
        AssertionError: ours breaks the two-times rule, or DeepSpeed's computes something else.
    """
    case = replace(work.case, num_tokens=48, dim=64, hidden_dim=96)
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    x, grad = (torch.randn(n * 48, 64, generator=generator).bfloat16() for _ in range(2))
    mine = slice(48 * rank, 48 * (rank + 1))

    def results(call: Callable[[Tensor], Tensor], dtype: torch.dtype, rows: slice) -> list[Tensor]:
        leaf = x[rows].to(dtype, copy=True).requires_grad_()
        y = call(leaf)
        y.backward(grad[rows].to(dtype))
        assert leaf.grad is not None
        return [y.detach(), leaf.grad]

    whole, spread = make_layer(case), _spread(make_layer(case))
    exact = EinsumMoE(whole, replace(case, dtype=torch.float64)).double()
    everything = slice(None)
    oracle = [t[mine] for t in results(exact, torch.float64, everything)]
    plain = [t[mine] for t in results(lambda v: whole(v)[0], case.dtype, everything)]
    ours = results(lambda v: spread(v)[0], case.dtype, mine)
    w_in, w_out = exact.w_in.grad, exact.w_out.grad
    oracle += [exact.router.grad, w_in.view_as(whole.experts.w_in), w_out]
    plain += [whole.router.proj.weight.grad, whole.experts.w_in.grad, whole.experts.w_out.grad]
    ours += [_summed(spread.router.proj.weight.grad)]
    ours += [_whole(spread.experts.w_in.grad), _whole(spread.experts.w_out.grad)]
    names = ("y", "x gradient", "router gradient", "w_in gradient", "w_out gradient")
    for name, a, b, c in zip(names, ours, plain, oracle, strict=True):
        assert_two_times(a, b, c, what=f"{name} on {n} ranks ({case.dtype})", dtype=case.dtype)
    if DROPLESS not in work.peers:
        return
    moe = _deepspeed(case, drop_tokens=False)
    theirs = results(moe, case.dtype, mine)
    theirs += [_summed(moe.router.grad), *moe.weight_grads()]
    first, count = moe.first_expert, moe.num_local
    local = slice(first, first + count)
    oracle[3:] = [w_in[local], w_out[local]]
    for name, a, c in zip(names, theirs, oracle, strict=True):
        distance = (a.double() - c).norm() / c.norm()
        assert distance < FAR_OFF, f"{name} of DeepSpeed's layer is off by {distance:.3f}"


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _summed(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total
