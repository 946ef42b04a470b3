"""Child processes of this package, for work whose time and memory are bounded: each answers one request at a time.

A request and its answer are bytes. The process starts with the first request and ends with its owner. One that was
ended, by a limit or because its request was interrupted, is started again for the next request.
"""

import atexit
import io
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import IO
from weakref import WeakSet

from expertmesh.config.base import environment_of_child
from expertmesh.errors import ConfigError

_SIZE = struct.Struct("<Q")
_Pipe = IO[bytes] | io.FileIO


class ChildEndedError(Exception):
    """The process ended in place of an answer. `returncode`: its exit code; of a signal, the negative number."""

    def __init__(self, returncode: int) -> None:
        super().__init__(returncode)
        self.returncode = returncode


class ChildProcess:
    """A process that runs a module, whose body calls `answer_requests`. Thread-safe; a fork has a process of its
    own."""

    def __init__(self, module: str, what: str) -> None:
        self._module, self._what, self._lock = module, what, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        _all.add(self)

    def ask(self, asked: bytes) -> bytes:
        """Answer to a request; requests wait for each other."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # somebody ended it between two requests
            try:
                process = self._process or self._started()
                assert process.stdin is not None and process.stdout is not None
                with suppress(BrokenPipeError):
                    _send(process.stdin, asked)
                answer = _received(process.stdout)
            except BaseException:  # interrupted: this answer must not be that of the next request
                self._end()
                raise
            if answer is None:
                returncode = process.wait()
                self._end()
                raise ChildEndedError(returncode)
            return answer

    def end(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def leave(self) -> None:
        """Forget a process that belongs to the process which this one was forked from."""
        self._lock = Lock()  # another thread may have held it
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # nobody here waits for it
            _close(process)

    def _started(self) -> "subprocess.Popen[bytes]":
        with suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                bufsize=0,  # a buffer would be flushed by every process that is forked from this one
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment_of_child(),
                start_new_session=True,  # Ctrl-C is the owner's
            )
            assert self._process.stdout is not None
            if _received(self._process.stdout) is not None:
                return self._process
        raise ConfigError(
            f"{self._what} cannot start ({sys.executable} -m {self._module}); leave some memory and processes for it"
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _close(process)
            process.wait()


def answer_requests(answer: Callable[[bytes], bytes]) -> None:
    """Answer the owner's requests until it ends."""
    source, to = io.FileIO(0), io.FileIO(1, "w")
    _send(to, b"")  # ready
    while (asked := _received(source)) is not None:
        _send(to, answer(asked))


def _close(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def _send(to: _Pipe, content: bytes) -> None:
    left = memoryview(_SIZE.pack(len(content)) + content)
    while left:
        left = left[to.write(left) :]


def _received(source: _Pipe) -> bytes | None:
    """A message; None: the other side has ended."""
    if (head := _read(source, _SIZE.size)) is None:
        return None
    return _read(source, _SIZE.unpack(head)[0])


def _read(source: _Pipe, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        if not (more := source.read(size - len(found))):
            return None
        found += more
    return bytes(found)


_all: "WeakSet[ChildProcess]" = WeakSet()


def _of_all(do: Callable[[ChildProcess], None]) -> None:
    for one in list(_all):
        do(one)


os.register_at_fork(after_in_child=lambda: _of_all(ChildProcess.leave))
atexit.register(lambda: _of_all(ChildProcess.end))
