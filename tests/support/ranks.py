"""A pool of rank processes for tests: forked once (by the nursery), then handed functions to run together.

Gloo on the loopback interface, with a file for the first contact. A function runs on all ranks at once; the first
error of any rank is raised in the test, and the pool is then made anew. On a loaded machine gloo sometimes fails to
connect the ranks of a new group, before anything of ours has run; the function then runs once more on new ranks.
Each group has three threads of gloo's, one of which wakes up a hundred times a second; some hundred groups would take a
core from the others. So groups that a function made are destroyed behind it, ranks that keep many are made anew, and
ranks without work are stopped (SIGSTOP) until the next function.
"""

import contextlib
import functools
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.comm.world import World
from tests.support.nursery import Child, the_nursery
from tests.support.patience import PATIENCE_S

_MOST_KEPT = 16
"""Maximum number of groups that the worlds of `world_of` keep for the next function."""
_REST_AFTER_S = 1.0 if sys.platform == "linux" else None
"""Seconds after which a rank without work stops; never where it would outlive a test run that is killed."""
_GONE = EOFError, ConnectionError
"""Errors of reading from a process that died."""
_NOT_CONNECTED = "connectFullMesh failed"
"""In gloo's message when a group's ranks could not connect."""


class RankError(AssertionError):
    """A rank failed; the message has its traceback."""


class RankPool:
    """Processes 0 ... n - 1 of one gloo group.

    Args:
        num_ranks: n.
        timeout_s: of the default group's collectives, and the longest that `run` waits between two answers.
    """

    def __init__(self, num_ranks: int, *, timeout_s: float = PATIENCE_S) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self._ranks: list[tuple[Child, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank; once more, on new ranks, if gloo could not connect a group.

        Args:
            function: at the top of a module that was imported when the nursery was made, or can be. It starts from
                nothing.
            args: pickled.
            kwargs: pickled.

        Returns:
            What each rank returned (pickled on the way).

        Raises:
            RankError: a rank raised or died, or none answered in time. The pool is stopped then.
        """
        try:
            return self._run(function, args, kwargs)
        except RankError as error:
            if _NOT_CONNECTED not in str(error):
                raise
        return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not self._ranks:
            self._start()
        self._wake()
        for _, pipe in self._ranks:
            with contextlib.suppress(ConnectionError):  # told below
                pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        are_last = False
        while len(results) < self.num_ranks:
            open_pipes = {p: n for n, (_, p) in enumerate(self._ranks) if n not in results}
            ready = wait(list(open_pipes), timeout=2 * self.timeout_s)
            if not ready:
                self._fail(f"ranks {sorted(open_pipes.values())} did not answer")
            for rank in [n for p, n in open_pipes.items() if p in ready]:
                try:
                    ok, value, is_last = self._ranks[rank][1].recv()
                except _GONE:
                    ok, value, is_last = False, "the process died", True
                if not ok:
                    self._fail(f"rank {rank} of {self.num_ranks}:\n{value}")
                results[rank] = value
                are_last = are_last or is_last
        if are_last:
            self.stop()
        for _, pipe in self._ranks:
            with contextlib.suppress(ConnectionError):
                pipe.send("taken")
        return [results[rank] for rank in range(self.num_ranks)]

    def _wake(self) -> None:
        """Let all ranks run, and wait until they say that they do, because one may have been about to stop."""
        for _, pipe in self._ranks:
            with contextlib.suppress(ConnectionError):
                pipe.send("wake up")
        asleep = {pipe: (rank, process) for rank, (process, pipe) in enumerate(self._ranks)}
        end = time.monotonic() + 2 * self.timeout_s
        while asleep:
            for _, process in asleep.values():
                process.kill(signal.SIGCONT)
            for pipe in wait(list(asleep), timeout=1):
                rank, _ = asleep.pop(pipe)
                try:
                    pipe.recv()
                except _GONE:
                    self._fail(f"rank {rank} of {self.num_ranks}:\nthe process died")
            if time.monotonic() > end:
                self._fail(f"ranks {sorted(rank for rank, _ in asleep.values())} did not wake up")

    def _fail(self, message: str) -> None:
        self.stop()
        raise RankError(message)

    def _start(self) -> None:
        nursery = the_nursery()
        # the first call of an operator imports torch._dynamo: two seconds on every rank
        nursery.import_modules("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.num_ranks):
            here, there = Pipe()
            words = rank, self.num_ranks, store, self.timeout_s, sys.path
            self._ranks.append((nursery.start(_serve, *words, pipe=there), here))
            there.close()

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(pipe: Connection, rank: int, num_ranks: int, store: Path, timeout_s: float, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    # what is there now is not looked at again when what a function made is collected
    gc.freeze()
    with contextlib.suppress(*_GONE):
        while True:
            function, args, kwargs = _next_call(pipe)
            torch.manual_seed(0)
            try:
                ok, value = True, function(*args, **kwargs)
            except BaseException:
                ok, value = False, traceback.format_exc()
            is_last = len(_kept()) > _MOST_KEPT or not _names_stay_new()
            pipe.send((ok, value, is_last))
            if ok and not is_last:
                try:
                    _close_groups()
                except RuntimeError:  # another rank has ended, and with it the pool
                    return
            # a thread of this process hands over the tensors of what was sent
            pipe.recv()  # "taken"


def _next_call(pipe: Connection) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Wait for the next call; stopped, if it is long in coming."""
    while not pipe.poll(_REST_AFTER_S):
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.recv()  # "wake up"
    pipe.send("awake")
    return pipe.recv()


def world_of(is_half: bool = False) -> World:
    """The world of all ranks of this pool, or one of its halves: the even ranks, the odd ones. Made once."""
    return _world_of(is_half)


_KEPT: list[World] = []


@functools.cache
def _world_of(is_half: bool) -> World:
    if not is_half:
        world = World()
    else:
        everyone = range(dist.get_world_size())
        halves = [dist.new_group(list(everyone[half::2])) for half in (0, 1)]
        world = World(halves[dist.get_rank() % 2])
    _KEPT.append(world)
    return world


def _kept() -> list[dist.ProcessGroup]:
    """The default group, and groups of kept worlds."""
    return [dist.group.WORLD, *(g for w in _KEPT for g in (w._group, *w._made))]


def _made() -> list[dist.ProcessGroup]:
    """All other groups."""
    kept = _kept()
    return [g for g in dist.distributed_c10d._world.pg_map if all(g is not one for one in kept)]


def _names_stay_new() -> bool:
    """Whether no group is named by its members and the number of groups, a name that another could have behind it."""
    names = dist.distributed_c10d._world.pg_names
    return all(names[group].isdecimal() for group in _made())


def _close_groups() -> None:
    """Destroy the groups of no kept world, and the threads of those that nothing refers to."""
    # of all ranks, because a group may have some only, and another rank may still wait for this one's last message
    dist.barrier()
    made = _made()
    if made:
        for group in made:
            dist.destroy_process_group(group)
        # DTensor caches results of operators by mesh, and an equal mesh will have other groups
        from torch.distributed.tensor import debug  # here, because it imports torch's compiler

        debug._clear_sharding_prop_cache()
        del made, group
        gc.collect()
