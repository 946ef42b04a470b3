"""Chat templates are rendered in a process of their own, whose time and memory are bounded.

A template is a program from a model's folder: it may loop for ever, or ask for a number of a billion digits while it is
compiled. The process ends after `SECONDS` of a processor for one text, even inside one long operation, and the next
text starts another. It ends with its owner, too.
"""

import marshal
import resource
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from expertmesh.config.child_process import ChildEndedError, ChildProcess, answer_requests
from expertmesh.errors import ConfigError
from expertmesh.text.limits import TOO_LONG, TextLimitError

SECONDS = 1.0
"""Time of a processor that one text may take; published templates take milliseconds."""
MEMORY_BYTES = 2**30
"""Address space of the process."""
MOST_CHARACTERS = 2**26
"""Characters of the longest text, of a model whose window is unknown or larger."""
TOO_MUCH = "chat_template_limit"
_TEXT, _ERROR, _LONG, _MEMORY = b"t", b"e", b"l", b"m"
_LATE, _ENDED = b"s", b"n"
"""Kinds of answers: first what the process gives, then what stands for an answer that it did not give."""


def render(
    source: str,  # the template
    variables: Mapping[str, Any],  # its variables; what is no plain value becomes the name of its type
    *,
    unset: Collection[str] | None = None,  # see `chat_template.rendered`
    most_characters: int | None = None,  # characters of the longest text; None: `MOST_CHARACTERS`
) -> str:
    """Text that a chat template writes."""
    most = MOST_CHARACTERS if most_characters is None else min(most_characters, MOST_CHARACTERS)
    try:
        names = None if unset is None else sorted(unset)
        asked = marshal.dumps((source, _plain(variables), names, most, SECONDS))
    except (RecursionError, ValueError):
        raise ConfigError("messages are nested deeper than Python allows; flatten them") from None
    try:
        answer = _process.ask(asked)
        kind, told = answer[:1], answer[1:]
    except ChildEndedError as ended:
        kind, told = _LATE if ended.returncode == -signal.SIGPROF else _ENDED, b""
    if kind == _TEXT:
        return told.decode()
    if kind == _ERROR:
        raise ConfigError(told.decode(errors="replace"))
    if kind == _LONG and most < MOST_CHARACTERS:
        raise TextLimitError(
            f"the model's chat template writes more than {most} characters, for which the model has no room; shorten "
            "them",
            code=TOO_LONG,
        )
    why = {
        _LONG: f"writes more than {most} characters",
        _MEMORY: f"needs more than {MEMORY_BYTES >> 20} MiB",
        _LATE: f"takes more than {SECONDS:g} s of a processor",
        _ENDED: "ended the process that renders it",
    }[kind]
    raise TextLimitError(f"the model's chat template {why}; say less, or use another template", code=TOO_MUCH)


def _plain(value: Any) -> Any:
    """A value of Python's own types alone, so that a template can call no method of another."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [*map(_plain, value)]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return None if value is None else f"<{type(value).__name__}>"


def serve() -> None:
    """Render texts; the body of the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with suppress(ValueError, OSError):  # where the system has no such limit
        known = resource.getrlimit(resource.RLIMIT_AS)
        bounds = [MEMORY_BYTES, *(n for n in known if n != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), known[1]))
    answer_requests(_answer)


def _answer(asked: bytes) -> bytes:
    """Kind of the answer, and the text or the reason."""
    from expertmesh.text.chat_template import TooMuchWrittenError, rendered

    try:
        template, variables, unset, most, seconds = marshal.loads(asked)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        return _TEXT + rendered(template, variables, unset=unset, most_characters=most).encode()
    except ConfigError as error:
        return _ERROR + str(error).encode(errors="replace")
    except UnicodeEncodeError:
        return _ERROR + b"the model's chat template writes half a character; use another"
    except TooMuchWrittenError:
        return _LONG
    except MemoryError:
        return _MEMORY
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


_process = ChildProcess("expertmesh.text.template_process", "the process that renders chat templates")

if __name__ == "__main__":
    serve()
