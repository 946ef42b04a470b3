"""Number of CPU threads, chosen by measuring the model's own matmuls; `runs.arithmetic` chooses the dtype the same way.

More threads are not always faster. Small matmuls end before threads are synchronized, and next to other programs each
operation waits for its slowest thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.comm.cores import Room, own_room, share_of, users_threads
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.arithmetic import USUAL_PRODUCTS, cut, in_words
from expertmesh.runs.precision import Precision

MARGIN = 1.1
"""Fewer threads are chosen if they take at most this times the shortest time."""

_MOST_PER_CORE = (
    16  # more threads only wait for one another; a test may use more than there are cores
)
_SIZE = 1 << 26  # multiply-adds of one product
_PIECE_S = 2e-3
_ROUNDS, _FEWEST_ROUNDS = 7, 3
_BUDGET_S = 0.3
_MOST_BYTES = 1 << 28

Piece = tuple[Callable[[], object], float]
"""Function to time, and the number of times that a step runs it."""


@dataclass(frozen=True)
class Threads:
    """Number of CPU threads of a process.

    Attributes:
        count: number of threads.
        why: reason in a few words.
        seconds: time of a step's matmuls by number of threads, if it was measured.
    """

    count: int
    why: str
    seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Number and reason as text."""
        return f"{self.count} thread{'s' if self.count > 1 else ''} ({self.why})"


def check_threads(given: int | None) -> None:
    """Check that parallel.num_threads is not far above the number of cores.

    Raises:
        ConfigError: it is far above.
    """
    cores = len(own_room().cores)
    if given is not None and given > max(_MOST_PER_CORE * cores, torch.get_num_threads()):
        raise ConfigError(
            "parallel.num_threads",
            given,
            f"this process may use {_cores(range(cores))}",
            "use at most as many",
        )


def settle_threads(
    ranks: Ranks,
    measure: Callable[[Sequence[int]], Mapping[int, float]],
    *,
    given: int | None = None,
    began_with: int | None = None,
    room: Room | None = None,
) -> Threads:
    """Number of threads of this process; every rank must call, and rank 0 measures for all.

    Args:
        ranks: ranks that compute at the same time.
        measure: seconds of a step's matmuls for each of some numbers of threads.
        given: parallel.num_threads.
        began_with: number of threads that the run started with, which is kept because sums depend on it; rank 0's value
            is used.
        room: cores of this process; None: from the system.
    """
    room = own_room() if room is None else room
    share = share_of(room, ranks.gather(room))
    usual = torch.get_num_threads()
    if given is not None:
        return Threads(given, "parallel.num_threads")

    def decide() -> Threads:
        if (named := users_threads()) is not None:
            return Threads(usual, named)
        if began_with is not None:
            return Threads(began_with, "as the run began")
        # torch.set_num_threads of the caller is an upper bound; 1 on several ranks comes from torchrun
        most = share if ranks.size > 1 and usual == 1 else min(usual, share)
        if most == 1:
            alone = len(room.cores) == 1 or usual == 1
            return Threads(
                1, "all that it may use" if alone else f"its share of {_cores(room.cores)}"
            )
        return choose(measure(numbers_up_to(most)))

    found = ranks.on_rank0(decide)
    if users_threads() is not None:
        return Threads(usual, found.why)
    return found if found.count <= share else Threads(share, found.why, found.seconds)


def _cores(cores: Sequence[int]) -> str:
    return f"{len(cores)} core{'s' if len(cores) > 1 else ''}"


def numbers_up_to(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def choose(seconds: Mapping[int, float]) -> Threads:
    """Smallest number of threads within `MARGIN` of the shortest time.

    Args:
        seconds: time by number of threads.
    """
    shortest = min(seconds.values())
    count = min(n for n, found in seconds.items() if found <= MARGIN * shortest)
    times = ", ".join(f"{n}: {in_words(found)}" for n, found in sorted(seconds.items()))
    return Threads(count, f"measured, {times}", dict(seconds))


@contextmanager
def computing_with(threads: Threads) -> Iterator[None]:
    """Context that sets PyTorch's number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads.count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads_of_calls(
    model: nn.Module, precision: Precision, *, num_rows: int, ranks: Ranks | None = None
) -> Iterator[Threads | None]:
    """Context with the fastest number of threads for a trained model; on a GPU nothing changes.

    Args:
        model: model on this process.
        precision: compute precision.
        num_rows: tokens of a call.
        ranks: ranks that compute at the same time; every rank must call. None: this process alone.
    """
    if precision.device.type != "cpu":
        yield None
        return
    measure = partial(measure_forward, model, precision, num_rows=num_rows)
    threads = settle_threads(Ranks() if ranks is None else ranks, measure)
    with computing_with(threads):
        yield threads


def measure_step(
    products: Sequence[Product], precision: Precision, counts: Sequence[int]
) -> dict[int, float]:
    """Seconds of the matmuls of a training step for each number of threads; large matmuls are measured at a smaller size.

    Args:
        products: matmuls that dominate a step; empty: `USUAL_PRODUCTS`.
        precision: compute precision.
        counts: numbers of threads.
    """
    with torch.no_grad(), precision.products():
        pieces = [
            (
                partial(_forward_and_backward, *_factors(product, precision.compute_dtype)),
                product.count,
            )
            for product in (cut(p, _SIZE) for p in products or USUAL_PRODUCTS)
        ]
        return race(pieces, counts)


def _factors(product: Product, dtype: torch.dtype) -> list[Tensor]:
    sides = (product.num_rows, product.in_features, product.out_features)
    return [torch.ones(sides[i], sides[j], dtype=dtype) for i, j in ((0, 1), (2, 1), (0, 2))]


def _forward_and_backward(x_MK: Tensor, w_NK: Tensor, grad_MN: Tensor) -> None:
    F.silu(cpu_products.product(x_MK, w_NK.T))
    cpu_products.product(grad_MN, w_NK)
    cpu_products.product(grad_MN.T, x_MK)


def measure_forward(
    model: nn.Module, precision: Precision, counts: Sequence[int], *, num_rows: int
) -> dict[int, float]:
    """Seconds of the matmuls of a forward pass for each number of threads, with the model's own weights.

    Args:
        model: model on the CPU. Only the first expert of each layer is used.
        precision: compute precision.
        counts: numbers of threads.
        num_rows: tokens of a call.
    """
    weights = list(_matrices(model.parameters()))
    if not weights:
        return race([(lambda: None, 1)], counts[:1])
    with torch.no_grad(), precision.autocast():
        rows = [torch.ones(num_rows, w.shape[1], dtype=w.dtype) for w in weights]

        def forward() -> None:
            for x_MK, w_NK in zip(rows, weights, strict=True):
                F.silu(F.linear(x_MK, w_NK))

        return race([(forward, 1)], counts)


def _matrices(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for p in parameters:
        local = getattr(p, "_local_tensor", p).detach()
        if local.ndim > 2 and len(local):
            local = local[0].flatten(0, -2)
        if local.ndim == 2 and local.numel() and local.is_floating_point():
            found.append(local)
    num_bytes = sum(w.numel() * w.element_size() for w in found)
    return found[:: max(1, num_bytes // _MOST_BYTES)]


def race(
    pieces: Sequence[Piece],
    counts: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Median seconds by number of threads over several interleaved rounds, after a warm-up round (code generation, page faults).

    Wall time, because waiting is measured as well; other programs slow all numbers of threads alike.
    """
    took: dict[int, list[float]] = {n: [] for n in counts}
    before = torch.get_num_threads()
    try:
        repeats = _repeats(pieces, counts[0], clock)
        end = clock() + _BUDGET_S
        for number in range(_ROUNDS + 1):
            for n in counts if number % 2 else reversed(counts):
                torch.set_num_threads(n)
                pieces[0][0]()  # threads are created at the first operation
                seconds = 0.0
                for (work, weight), times in zip(pieces, repeats, strict=True):
                    began = clock()
                    for _ in range(times):
                        work()
                    seconds += (clock() - began) * weight / times
                if number:
                    took[n].append(seconds)
            if number >= _FEWEST_ROUNDS and clock() > end:
                break
    finally:
        torch.set_num_threads(before)
    return {n: median(seconds) for n, seconds in took.items()}


def _repeats(pieces: Sequence[Piece], count: int, clock: Callable[[], float]) -> list[int]:
    """Repetitions of each piece that take long enough to be measured."""
    torch.set_num_threads(count)
    found = []
    for work, _ in pieces:
        work()
        began = clock()
        work()
        found.append(max(1, min(100, round(_PIECE_S / (clock() - began + 1e-9)))))
    return found
