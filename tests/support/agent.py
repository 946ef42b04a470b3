"""Ranks started as torchrun's agent does it, but forked, so that they need not import anything.

Like torchrun's, this agent keeps one key-value store over all lives of the ranks, dead ones' keys included.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.cli import torchrun
from expertmesh.cli.main import main
from tests.support.nursery import Child, the_nursery

_POLL_S = 0.01


class Agent:
    """Ranks 0 ... n - 1, in as many lives as are started.

    Args:
        num_ranks: n.
        folder: for what the ranks print, `life0-rank0.txt` and so on.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.num_ranks, self.folder, self.num_lives = num_ranks, folder, 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Child] = []
        # the first call of an operator imports torch._dynamo: two seconds on every rank
        the_nursery().import_modules("torch.distributed.fsdp", "torch._dynamo")

    def start(self, function: Callable[..., int | None], *args: Any) -> None:
        """Begin a life: every rank calls a function and exits with what it returns (None: 0; an exception: 1)."""
        life, self.num_lives = self.num_lives, self.num_lives + 1
        for rank in range(self.num_ranks):  # so that it can be read before the rank runs
            self._output(life, rank).touch()
        places = [(rank, self.num_ranks, life, self.store.port) for rank in range(self.num_ranks)]
        self.ranks = [
            the_nursery().start(_live, place, self._output(life, place[0]), function, args) for place in places
        ]

    def wait(self, *, timeout_s: float, until_one_fails: bool = False) -> list[int | None]:
        """Exit codes when all have ended, or one has not ended well, or the time is over; None: still running."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            codes = [process.exitcode for process in self.ranks]
            if None not in codes or (until_one_fails and any(codes)):
                break
            time.sleep(_POLL_S)
        return [process.exitcode for process in self.ranks]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        self.ranks[rank].kill(number)

    def stop(self) -> None:
        """End the ranks that are left."""
        for process in self.ranks:
            process.kill()
            process.join()

    def run(self, function: Callable[..., int | None], *args: Any, restarts: int, timeout_s: float) -> list[int | None]:
        """Live until all ranks end well, starting all anew whenever one does not; exit codes of the last life."""
        while True:
            self.start(function, *args)
            codes = self.wait(timeout_s=timeout_s, until_one_fails=True)
            self.stop()
            if not any(codes) or self.num_lives > restarts:
                return codes

    def printed(self, rank: int) -> str:
        """What a rank printed in the last life."""
        return self._output(self.num_lives - 1, rank).read_text()

    def _output(self, life: int, rank: int) -> Path:
        return self.folder / f"life{life}-rank{rank}.txt"


def _live(
    place: tuple[int, int, int, int],
    output: Path,
    function: Callable[..., int | None],
    args: tuple[Any, ...],
) -> int | None:
    rank, num_ranks, life, port = place
    error_file = output.parent / f"life{life}" / str(rank) / "error.json"
    error_file.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": str(life),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        # The test run's own streams may be captured.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        torch.set_num_threads(1)
        return function(*args)


def hasty_main(words: list[str]) -> int:
    """The command line of a rank that does not wait long for another to say why it fails, as a killed one never
    does."""
    torchrun._LINGER_S = 0.5
    return main(words)
