"""Collectives of a training loop (`Ranks`), and the process groups of a run; with one rank every method is local."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.comm.collectives import start_all_reduce
from expertmesh.comm.group import wait
from expertmesh.comm.launcher import ended_with_launcher
from expertmesh.comm.start import abort_groups, start_group
from expertmesh.comm.world import World
from expertmesh.errors import CollectiveError, ConfigError, PeerError, text_of
from expertmesh.parallel.clip import clip_grad_norm_
from expertmesh.parallel.tensor import join_parts, tensor_group

T = TypeVar("T")


class Ranks:
    """Ranks of one program, all of which work on the same batches or requests.

    Args:
        world: the ranks; None: this process alone.
        tp_degree: number of neighbouring ranks that share the same rows, each with its part of their positions.
        reduces_once: whether dense gradients are summed over ranks once per step, not once per micro-batch.
    """

    def __init__(self, world: World | None = None, *, tp_degree: int = 1, reduces_once: bool = False) -> None:
        self.world, self.tp_degree, self.reduces_once = world, tp_degree, reduces_once

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.world is None else self.world.size

    @property
    def num_row_parts(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        return self.size // self.tp_degree

    @property
    def position(self) -> int:
        """Index of this rank, from 0."""
        return 0 if self.world is None else self.world.position

    @property
    def is_leader(self) -> bool:
        """Whether this rank is rank 0, which prints and writes shared files."""
        return self.position == 0

    def rows(self, start: int, stop: int) -> slice:
        """Slice of the rows start ... stop - 1 that this rank computes: consecutive in rank order, equal if the parts
        divide them."""
        if self.world is None:
            return slice(start, stop)
        n, p, R = stop - start, self.world.position // self.tp_degree, self.num_row_parts
        return slice(start + n * p // R, start + n * (p + 1) // R)

    def positions(self, x_BS: Tensor) -> Tensor:
        """Sequence positions of this rank in its rows, for which the model returns logits; tp_degree must divide S."""
        if self.world is None or self.tp_degree == 1:
            return x_BS
        return x_BS.chunk(self.tp_degree, 1)[self.world.position % self.tp_degree]

    def join_positions(self, x_BS: Tensor) -> Tensor:
        """Values at all positions from those at each rank's, as `positions` cuts them; differentiable."""
        if self.world is None or self.tp_degree == 1:
            return x_BS
        group = tensor_group(self.world, self.tp_degree)
        return join_parts(x_BS, group, dim=1, where="scores of answers")

    @property
    def counted(self) -> float:
        """Weight, in a sum over ranks, of a result that ranks with the same rows share: 1 on the first of them, else
        0."""
        return float(self.position % self.tp_degree == 0)

    def sum_(self, value: Tensor, *, what: str) -> Tensor:
        """Sum a contiguous tensor over ranks, in place."""
        if self.world is not None:
            wait(start_all_reduce(value, self.world.all_ranks(), where=what))
        return value

    def any(self, value: bool) -> bool:
        """Whether a value is true on any rank; waits for all ranks."""
        if self.world is None:
            return value
        return bool(self.sum_(torch.tensor(int(value), device=self.device), what="a vote"))

    @property
    def device(self) -> torch.device:
        """Device of small tensors in collectives."""
        kind = "cpu" if self.world is None else self.world.device_type
        return torch.device(kind)

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 only and return its result on all ranks (pickled); the other ranks wait."""
        if self.world is None:
            return function()
        answer: list[Any] = [None]
        error: BaseException | None = None
        if self.is_leader:
            try:
                answer = [(True, function())]
                pickle.dumps(answer)
            except Exception as failure:
                error, answer = failure, [(False, text_of(failure))]
        dist.broadcast_object_list(
            answer,
            group_src=0,
            group=self.world.all_ranks().process_group,
            device=self.device,
        )
        if error is not None:
            raise error
        done, value = answer[0]
        if not done:
            raise PeerError(f"{value} (rank 0)")
        result: T = value
        return result

    def on_all(self, function: Callable[[], T]) -> T:
        """Run a function on every rank, and report a failure to all before any continues."""
        error: BaseException | None = None
        value: Any = None
        try:
            value = function()
        except Exception as failure:
            if self.world is None:
                raise
            error = failure
        reasons = self.gather(None if error is None else text_of(error))
        first = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if first is None:
            result: T = value
            return result
        if error is not None and first == self.position:
            raise error
        raise PeerError(f"{reasons[first]} (rank {first})") from error

    def gather(self, value: T) -> list[T]:
        """Values of all ranks (pickled), in rank order, on every rank."""
        if self.world is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.world.all_ranks().process_group)
        return values

    def check_equal(self, value: str, *, what: str) -> None:
        """Check that all ranks have the same text."""
        texts = self.gather(value)
        odd = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if odd is None:
            return
        kind = ConfigError if self.is_leader else PeerError
        raise kind(f"{what}: rank {odd} has another than rank 0; start all ranks with the same command and files")

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients by their joint norm over all ranks; returns the norm before clipping."""
        if self.world is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return clip_grad_norm_(parameters, max_norm)

    def announce_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        """Tell FSDP2 before the forward whether gradients are reduced after the backward."""
        if self.reduces_once and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)


def backend_for(device_type: str, *, on_host: bool) -> str:
    """Backend of torch's process group for collectives of a device.

    Args:
        on_host: whether collectives also take tensors in host memory, which NCCL does not.
    """
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if on_host else "nccl"


@contextmanager
def open_ranks(
    *,
    device_type: str,  # "cpu" (gloo) or "cuda" (NCCL)
    timeout_s: float,  # the timeout of every collective
    tp_degree: int = 1,  # see `Ranks`
    reduces_once: bool = False,  # see `Ranks`
    offload: bool = False,
    on_host: bool = False,  # whether collectives also take tensors in host memory, as steps of an engine do
) -> Iterator[Ranks]:
    """Ranks that torchrun started, or this process alone.

    An existing process group is used and left open.

    Args:
        offload: whether parameters rest in host memory. Groups then have a CPU backend as well, and a single process is
            a world of one rank.
    """
    launched = dist.is_torchelastic_launched()
    ours = not dist.is_initialized() and (launched or offload)
    if ours:
        backend = backend_for(device_type, on_host=offload or on_host)
        if launched:
            start_group(backend, timeout_s=timeout_s)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = None
    if dist.is_initialized() and (offload or dist.get_world_size() > 1):
        world = World(device_type=device_type, timeout_s=timeout_s)
    agree = device_type == "cpu"  # a gloo rank can end alone: its peers notice at once
    try:
        with ended_with_launcher():
            yield Ranks(world, tp_degree=tp_degree, reduces_once=reduces_once)
        agree = True
    except RuntimeError as error:
        # FSDP2's collectives and torch's object collectives raise without naming the rank.
        if world is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            f"rank {world.ranks[world.position]}: lost another rank in a collective of the dense layers or of the "
            f"start: {reason}"
        ) from error
    finally:
        end_groups(world, ours=ours, agree=agree)


def end_groups(world: World | None, *, ours: bool, agree: bool) -> None:
    """End the groups of a run.

    Args:
        world: the world that created the groups; None: no groups.
        ours: whether the run created torch's default group; if not, it stays.
        agree: whether all ranks arrive here, or need not. Otherwise the run's own groups are aborted, and other groups
            are left open.
    """
    if not agree:
        if ours:
            abort_groups()
        return
    if world is not None:
        world.close()
    if ours:
        dist.destroy_process_group()
