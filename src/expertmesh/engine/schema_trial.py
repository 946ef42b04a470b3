"""Trial of a JSON schema in a process of its own, which ends where the schema takes too much time or memory.

A compiler of schemas can be kept busy for minutes by one line, and cannot be interrupted; a process can.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from threading import Lock
from typing import Any

from expertmesh.config.base import environment_of_child
from expertmesh.errors import ConfigError

SECONDS = 5
MOST_BYTES = 2**30
OPTIONS: Any = {
    "lenient": False,  # an unsupported keyword is an error, not ignored
    "coerce_one_of": False,
    # bounded: otherwise a model could write whitespace forever
    "whitespace_pattern": r"\n[ ]{0,32}|[ ]?",
}
TOO_LARGE = "it is too large to follow; make its patterns and lengths smaller"
_STEPS = 64
"""Number of tokens of an answer that are tried: some schemas compile, and fail at their first string."""
_MODULE = "expertmesh.engine.schema_trial"


def matcher_of(text: str, tokenizer: Any) -> Any:
    """llguidance matcher at the start of an answer.

    Args:
        text: the schema.
        tokenizer: llguidance tokenizer.

    Raises:
        ValueError: the schema cannot be kept, or nothing fits it.
    """
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
    problem = LLMatcher.validate_grammar(grammar, tokenizer)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if problem or matcher.get_error():
        raise ValueError(problem or matcher.get_error())
    return matcher


def is_given_up(matcher: Any) -> bool:
    """Whether llguidance has given up on a schema in the middle of an answer; false where no token fits."""
    return bool(matcher.is_error()) and "NoExtension" not in matcher.get_error()


class SchemaTrial:
    """Process that tries schemas, one at a time; it starts at the first one and waits for others. Thread-safe.

    Args:
        module: the module that it runs.
    """

    def __init__(self, module: str = _MODULE) -> None:
        self._lock, self._module = Lock(), module
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        atexit.register(self.close)

    def problem(self, text: str) -> str | None:
        """Reason why a schema cannot be kept; None: it can, with an ordinary amount of time and memory.

        Raises:
            ConfigError: the process cannot start.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(text) + "\n")
                process.stdin.flush()
                said = process.stdout.readline()
            except OSError:
                said = ""
            if said:
                found: str | None = json.loads(said)
                return found
            self._end()
            return f"it takes more than {SECONDS} s or {MOST_BYTES >> 30} GiB to compile; make it smaller"

    def close(self) -> None:
        """End the process; the next schema starts another one."""
        with self._lock:
            self._end()

    def _running(self) -> "subprocess.Popen[str]":
        """The process, started if there is none; a fork of this process starts its own."""
        if self._owner != os.getpid():
            self._process = None
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._owner = os.getpid()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment_of_child(),
                    start_new_session=True,  # Ctrl+C is not meant for it
                )
                assert self._process.stdout is not None
                is_ready = bool(self._process.stdout.readline())
            except OSError:
                is_ready = False
            if not is_ready:
                self._end()
                raise ConfigError(
                    "json_schema: the process that tries schemas cannot start "
                    f"({sys.executable} -m {self._module}); leave some memory and processes for it"
                )
        assert self._process is not None
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was left to write
                continue


TRIAL = SchemaTrial()
"""The trial of this process."""


def main() -> None:
    """Try the schemas of standard input, each a JSON string in a line; the answers are JSON, too."""
    import resource

    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    tokenizer = LLTokenizer("byte")
    _say("ready")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        said = json.dumps(_tried(json.loads(line), tokenizer))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(said)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _tried(text: str, tokenizer: Any) -> str | None:
    """Reason why a schema cannot be kept, found by compiling it and following one answer."""
    try:
        matcher = matcher_of(text, tokenizer)
    except ValueError as error:
        return str(error)
    for step in range(_STEPS):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
        if is_given_up(matcher):
            return TOO_LARGE
        if not allowed:
            return None if step else "nothing fits it"
        matcher.consume_tokens([allowed[step * 7919 % len(allowed)]])
    return None


if __name__ == "__main__":
    main()
