"""Number of CPU threads: by the sizes of the model's own products; `runs.arithmetic` has the rule, because sums depend
on it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertmesh.comm.cores import Room, own_room, share_of, users_threads
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.arithmetic import threads_for
from expertmesh.runs.precision import Precision

_MOST_PER_CORE = 16  # more threads only wait for one another; a test may use more than there are cores
_LEAST_ROWS = 16
"""Rows that take as long as reading the weight does; fewer take no less."""


@dataclass(frozen=True)
class Threads:
    """Number of CPU threads of a process."""

    count: int  # number of threads
    why: str  # reason in a few words

    @property
    def description(self) -> str:
        """Number and reason as text."""
        return f"{self.count} thread{'s' if self.count > 1 else ''} ({self.why})"


def check_threads(given: int | None) -> None:
    """Check that parallel.num_threads is not far above the number of cores."""
    cores = len(own_room().cores)
    if given is not None and given > max(_MOST_PER_CORE * cores, torch.get_num_threads()):
        raise ConfigError(
            "parallel.num_threads",
            given,
            f"this process may use {_cores(range(cores))}",
            "use at most as many",
        )


def settle_threads(
    ranks: Ranks,  # ranks that compute at the same time
    products: Sequence[Product],  # products that dominate a step
    *,
    given: int | None = None,  # parallel.num_threads
    began_with: int | None = None,
    room: Room | None = None,  # cores of this process; None: from the system
) -> Threads:
    """Number of threads of this process; every rank must call, and rank 0 decides for all.

    Args:
        began_with: number of threads that the run started with, which is kept because sums depend on it; rank 0's value
            is used.
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
        worth = threads_for(products)
        if worth < most:
            return Threads(worth, "for products of this size")
        alone = len(room.cores) == most or usual == most
        return Threads(most, "all that it may use" if alone else f"its share of {_cores(room.cores)}")

    found = ranks.on_rank0(decide)
    if users_threads() is not None:
        return Threads(usual, found.why)
    return found if found.count <= share else Threads(share, found.why)


def _cores(cores: Sequence[int]) -> str:
    return f"{len(cores)} core{'s' if len(cores) > 1 else ''}"


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
    """Context with the number of threads for a trained model; on a GPU nothing changes.

    Args:
        ranks: ranks that compute at the same time; every rank must call. None: this process alone.
    """
    if precision.device.type != "cpu":
        yield None
        return
    products = forward_products(model.parameters(), num_rows=num_rows)
    threads = settle_threads(Ranks() if ranks is None else ranks, products)
    with computing_with(threads):
        yield threads


def forward_products(parameters: Iterable[Tensor], *, num_rows: int) -> list[Product]:
    """Products of a forward pass with a model's own matrices, of experts the first of each layer."""
    found = []
    for p in parameters:
        local = getattr(p, "_local_tensor", p).detach()
        if local.ndim > 2 and len(local):
            local = local[0].flatten(0, -2)
        if local.ndim == 2 and local.numel() and local.is_floating_point():
            found.append(Product(max(num_rows, _LEAST_ROWS), local.shape[1], local.shape[0]))
    return found
