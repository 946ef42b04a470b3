"""A process that forks others: made early, it has one thread and does nothing else.

A fork copies the locks of a process, and none of its threads. A lock that another thread holds at that moment stays
locked in the copy for ever. The server of PyTorch's TCPStore, for one, is a thread that asks the C library's resolver
about each new connection; of the ranks forked beside it about one in two hundred hung at its own first use of the
resolver. So test runs fork their ranks from a process in which nothing has run.
"""

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.01


class Child:
    """A forked process.

    Attributes:
        pid: its number.
    """

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self._exitcode: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        if self._exitcode is None:
            self._exitcode = self._nursery.ask("exitcode", self.pid)
        return self._exitcode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if self.exitcode is None:
            os.kill(self.pid, number)

    def join(self) -> None:
        """Wait for its end."""
        while self.exitcode is None:
            time.sleep(_POLL_S)


class Nursery:
    """Forks at once, and then the forked process forks others whenever asked.

    What they find is what this process had imported and set when the nursery was made.
    """

    def __init__(self) -> None:
        self._orders, there = Pipe()
        _flush()  # or each child would print it again
        with warnings.catch_warnings():
            # Newer Pythons warn of forking beside threads; a test run's own wait for messages.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._orders.close()
            _nurse(there)
        there.close()
        self.owner, self._pid = os.getpid(), pid

    def close(self) -> None:
        """End it, and with it (on Linux) all children; once."""
        self.ask("end")
        self._orders.close()
        os.waitpid(self._pid, 0)

    def ask(self, kind: str, *words: Any, pipe: Connection | None = None) -> Any:
        """Give an order and wait for its answer.

        Raises:
            ChildProcessError: the nursery has ended.
        """
        try:
            self._orders.send((kind, words, pipe is not None))
            if pipe is not None:
                send_handle(self._orders, pipe.fileno(), self._pid)
            return self._orders.recv()
        except (OSError, EOFError) as error:
            raise ChildProcessError("the process that forks ranks has ended") from error

    def import_modules(self, *names: str) -> None:
        """Import modules once, so that the children need not; not those that start threads."""
        failure = self.ask("import", *names)
        if failure:
            raise ImportError(failure)

    def start(self, function: Callable[..., int | None], *args: Any, pipe: Connection | None = None) -> Child:
        """Fork a child that calls a function and exits with what it returns (None: 0; an exception: 1).

        Args:
            function: at the top of a module, which was imported when the nursery was made or can be.
            args: pickled.
            pipe: handed over as the first argument; the caller's copy may be closed then.
        """
        return Child(self, self.ask("fork", pickle.dumps((function, args)), pipe=pipe))


_made: Nursery | None = None


def the_nursery() -> Nursery:
    """The one of this process, made at the first call."""
    global _made
    if _made is None or _made.owner != os.getpid():
        _made = Nursery()
    return _made


def _nurse(orders: Connection) -> NoReturn:
    """All that the nursery's process does."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind = ""
    while kind != "end":
        try:
            kind, words, has_pipe = orders.recv()
        except EOFError:
            break
        answer: Any = None
        if kind == "fork":
            pipes = [Connection(recv_handle(orders))] if has_pipe else []
            answer = os.fork()
            if answer == 0:
                orders.close()
                _live(words[0], pipes)
            for pipe in pipes:
                pipe.close()
        elif kind == "exitcode":
            ended, status = os.waitpid(words[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif kind == "import":
            answer = _import(words)
        orders.send(answer)
    os._exit(0)


def _import(names: tuple[str, ...]) -> str:
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return ""


def _live(call: bytes, pipes: list[Connection]) -> NoReturn:
    """All that a child does; without the tidying up of an interpreter that was forked from a test run."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        code = _called(call, pipes)
        _flush()
    finally:
        os._exit(code)


def _called(call: bytes, pipes: list[Connection]) -> int:
    try:
        function, args = pickle.loads(call)
        return function(*pipes, *args) or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def die_with_parent() -> None:
    """Let a test run that is killed take this process with it (Linux; elsewhere it ends at the next closed pipe)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
