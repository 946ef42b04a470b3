"""Chat templates are rendered in a process of their own, whose time and memory are bounded.

A template is a program from a model's folder: it may loop for ever, or ask for a number of a billion digits while it is
compiled. The process ends after `SECONDS` of a processor for one text, even inside one long operation, and the next text
starts another. It ends with its owner, too.
"""

import atexit
import io
import marshal
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import IO, Any

from expertmesh.errors import ConfigError
from expertmesh.text.limits import TOO_LONG, TextLimitError

SECONDS = 1.0
"""Time of a processor that one text may take; published templates take milliseconds."""
MEMORY_BYTES = 2**30
"""Address space of the process."""
MOST_CHARACTERS = 2**26
"""Characters of the longest text, of a model whose window is unknown or larger."""
TOO_MUCH = "chat_template_limit"
_SIZE = struct.Struct("<cQ")
"""Kind of a message, and its bytes."""
_Pipe = IO[bytes] | io.FileIO
_TEXT, _ERROR, _LONG, _MEMORY = b"t", b"e", b"l", b"m"
_LATE, _ENDED = b"s", b"n"
"""Kinds of an answer that the process did not give."""


def render(
    source: str,
    variables: Mapping[str, Any],
    *,
    unset: Collection[str] | None = None,
    most_characters: int | None = None,
) -> str:
    """Text that a chat template writes.

    Args:
        source: the template.
        variables: its variables; what is no plain value becomes the name of its type.
        unset: see `chat_template.rendered`.
        most_characters: characters of the longest text; None: `MOST_CHARACTERS`.

    Raises:
        ConfigError: the source is not valid Jinja, or the template refuses its variables.
        TextLimitError: it takes too long, needs too much memory, or writes too much.
    """
    most = MOST_CHARACTERS if most_characters is None else min(most_characters, MOST_CHARACTERS)
    try:
        names = None if unset is None else sorted(unset)
        asked = marshal.dumps((source, _plain(variables), names, most, SECONDS))
    except (RecursionError, ValueError):
        raise ConfigError("messages are nested deeper than Python allows; flatten them") from None
    kind, told = _process.ask(asked)
    if kind == _TEXT:
        return told.decode()
    if kind == _ERROR:
        raise ConfigError(told.decode(errors="replace"))
    if kind == _LONG and most < MOST_CHARACTERS:
        raise TextLimitError(
            f"the model's chat template writes more than {most} characters, for which the model has no room; shorten them",
            code=TOO_LONG,
        )
    why = {
        _LONG: f"writes more than {most} characters",
        _MEMORY: f"needs more than {MEMORY_BYTES >> 20} MiB",
        _LATE: f"takes more than {SECONDS:g} s of a processor",
        _ENDED: "ended the process that renders it",
    }[kind]
    raise TextLimitError(
        f"the model's chat template {why}; say less, or use another template", code=TOO_MUCH
    )


def _plain(value: Any) -> Any:
    """A value of Python's own types alone, so that a template can call no method of another."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(map(_plain, value))
            if type(value) in (list, tuple)
            else [*map(_plain, value)]
        )
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None if value is None else f"<{type(value).__name__}>"


class _TemplateProcess:
    """The process, started with the first text. Methods are thread-safe; texts wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, asked: bytes) -> tuple[bytes, bytes]:
        """Kind and content of the answer."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # somebody ended it between two texts
            process = self._process or self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    _send(process.stdin, _TEXT, asked)
                answer = _received(process.stdout)
                if answer is None:
                    is_late = process.wait() == -signal.SIGPROF
                    answer = _LATE if is_late else _ENDED, b""
                    self._end()
            except BaseException:  # interrupted: its answer must not be that of the next text
                self._end()
                raise
            return answer

    def _started(self) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                bufsize=0,  # a buffer would be flushed by every process that is forked from this one
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ConfigError(
                f"the process that renders chat templates does not start ({error}); allow one more"
            ) from None
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            process.wait()

    def leave(self) -> None:
        """Close the pipes of a process that belongs to the process which this one was forked from."""
        if (process := self._process) is not None:
            process.returncode = 0  # nobody here waits for it
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def end(self) -> None:
        """End the process; the next text starts another."""
        with self._lock:
            self._end()


def _send(to: _Pipe, kind: bytes, content: bytes) -> None:
    left = memoryview(_SIZE.pack(kind, len(content)) + content)
    while left:
        left = left[to.write(left) :]


def _received(source: _Pipe) -> tuple[bytes, bytes] | None:
    """Kind and content of a message; None: the other side has ended."""
    if (head := _read(source, _SIZE.size)) is None:
        return None
    kind, size = _SIZE.unpack(head)
    content = _read(source, size)
    return None if content is None else (kind, content)


def _read(source: _Pipe, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        if not (more := source.read(size - len(found))):
            return None
        found += more
    return bytes(found)


def serve() -> None:
    """Render texts until the owner ends; the body of the process."""
    from expertmesh.text.chat_template import TooMuchWrittenError, rendered

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with suppress(ValueError, OSError):  # where the system has no such limit
        known = resource.getrlimit(resource.RLIMIT_AS)
        bounds = [MEMORY_BYTES, *(n for n in known if n != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), known[1]))
    source, to = io.FileIO(0), io.FileIO(1, "w")
    while (message := _received(source)) is not None:
        try:
            template, variables, unset, most, seconds = marshal.loads(message[1])
            signal.setitimer(signal.ITIMER_PROF, seconds)
            text = rendered(template, variables, unset=unset, most_characters=most)
            kind, content = _TEXT, text.encode()
        except ConfigError as error:
            kind, content = _ERROR, str(error).encode(errors="replace")
        except UnicodeEncodeError:
            kind, content = (
                _ERROR,
                b"the model's chat template writes half a character; use another",
            )
        except TooMuchWrittenError:
            kind, content = _LONG, b""
        except MemoryError:
            kind, content = _MEMORY, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(to, kind, content)


def _forget() -> None:
    """A forked process starts one of its own."""
    global _process
    _process.leave()
    _process = _TemplateProcess()


_process = _TemplateProcess()
os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _process.end())
