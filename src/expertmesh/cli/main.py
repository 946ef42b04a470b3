"""`expertmesh VERB ...`: dispatch to the verb, and print every expected error as one line on stderr.

Exit codes: 0 done; 1 the run failed (damaged checkpoint, diverged training, full disk, ...); 2 the user's input breaks
a rule; 129 the terminal was closed; 130 interrupted by Ctrl-C; 141 nobody reads the output any more; 143 stopped by
SIGTERM. A verb is a module with
`run(argv) -> int`; it is imported only when it is called, so that `--help` answers without torch.
"""

import difflib
import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.terminal_progress import silence_output, tell
from expertmesh.cli.torchrun import another_speaks, leave, linger, report_to_elastic
from expertmesh.cli.waiting import wait_passively
from expertmesh.config.launched import launched_rank
from expertmesh.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    PeerError,
    TrainingDivergedError,
)

_LEAST_ADDRESS_BYTES = 2**30
"""Address space of a verb with a tiny model; measured, 0.9 GB are too few and 1.2 GB enough."""
_WITHOUT_TORCH = ("plan",)
_MISTAKE = 2
"""Exit code of invalid input, which is detected before work starts."""


def _run_verb(name: str, argv: list[str]) -> int:
    run: Callable[[list[str]], int] = import_module(f"expertmesh.cli.{name}").run
    return run(argv)


_HELP = {
    "train": "train a model from a recipe",
    "sweep": "train one run per learning rate",
    "generate": "generate text",
    "serve": "serve a model with an OpenAI-compatible API",
    "runs": "list runs, and remove old checkpoints",
    "report": "summarize runs: learning curves, evaluation, samples",
    "export": "export weights to one safetensors file",
    "convert": "convert models from and to Hugging Face format",
    "quantize": "quantize experts to 8 or 4 bits",
    "experts": "prune the experts of a run, or merge two runs",
    "evaluate": "evaluate with lm-evaluation-harness",
    "doctor": "check what this machine and installation support",
    "plan": "estimate memory, time and price on a cluster",
    "bench": "benchmark the links between ranks, or a server",
}
VERBS = {name: (partial(_run_verb, name), text) for name, text in _HELP.items()}
"""Function of each verb of the core, and its line of help; `FAMILY_VERBS` has the others."""

VERBS_OF_ALL_RANKS = ("train", "generate", "serve", "doctor", "bench")
"""Verbs of the core that every process runs under torchrun; all others run on rank 0 only."""


def help_text() -> str:
    """Text of `expertmesh --help`."""
    texts = {name: text for name, (_, text) in VERBS.items()}
    texts |= {name: verb.text for name, verb in FAMILY_VERBS.items() if name not in texts}
    verbs = "\n".join(f"  {name:<10} {text}" for name, text in texts.items())
    text = f"""\
ExpertMesh trains and runs mixture-of-experts models.

usage: expertmesh [--debug] VERB [options]

verbs:
{verbs}

options:
  --help     show this help; of a verb: expertmesh VERB --help
  --version  show the version
  --debug    show the traceback of an error

examples:
  expertmesh train gpt-moe-demo --train.run-dir runs/demo
  expertmesh generate runs/demo "def main"
  expertmesh serve runs/demo
"""
    return fitted(text)


def program() -> NoReturn:
    """Run the command line and end the process."""
    wait_passively()
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is final, and nothing is left to interrupt
    leave(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Returns:
        0, 1, 2, 129, 130, 141 or 143, see the module's docstring. With `--debug` exceptions are not caught.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    was_closed = _open_streams()
    try:
        if was_closed:
            _check_closed(words)
        if words and not words[0].startswith("-"):
            _check_folder()
            _check_address_space(words)
        try:
            code = _run(words)
        except SystemExit as stop:  # after --help
            code = stop.code if isinstance(stop.code, int) else 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        silence_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if debug:
            raise
        return _fail("interrupted", 130)
    except Exception as error:
        if debug:
            raise
        return _report_error(error, words[0] if words else "")


def _check_folder() -> None:
    """Raise ConfigError if the current folder was deleted: MKL would end the process when torch is loaded, and relative
    paths fail."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder was removed; change to another one, or into it again (cd .) if it was made anew"
        ) from None


def _check_address_space(words: list[str]) -> None:
    """Raise ConfigError if the process may not have the address space that torch is loaded into: libraries would end it
    without a word."""
    limit = address_limit()
    if words[0] in _WITHOUT_TORCH or not {"-h", "--help"}.isdisjoint(words):
        return
    if limit is not None and limit < _LEAST_ADDRESS_BYTES:
        raise ConfigError(
            f"this process may have {limit / 1e6:,.0f} MB of address space, and PyTorch alone needs "
            f"{_LEAST_ADDRESS_BYTES / 1e6:,.0f} MB;"
            " raise the limit (ulimit -v, or prlimit --as)"
        )


def address_limit() -> int | None:
    """Bytes of address space that this process may have; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _check_closed(words: list[str]) -> None:
    """Handle a closed standard output: a training continues with a warning, other verbs fail."""
    if not words or words[0] != "train":
        raise ConfigError("standard output is closed: the answer has no place; open it, or send it to a file")
    if launched_rank()[0] == 0:
        tell("warning: standard output is closed; the run goes on without it, its numbers are in its metrics.jsonl")


def _run(words: list[str]) -> int:
    if launched_rank()[0] > 0 and not (words and _is_of_all_ranks(words[0])):
        return 0  # rank 0 answers
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if words[0] == "--version":
        from expertmesh import __version__

        print(f"expertmesh {__version__}")
        return 0
    return _verb(words[0])(words[1:])


def _open_streams() -> bool:
    """Make all three streams usable: unencodable text is escaped, and closed streams go to the null device.

    Returns:
        Whether standard output was closed. Files opened later would otherwise get its descriptor, and receive what
        libraries print.
    """
    was_closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    _name_failures(sys.stdout)
    return was_closed


def _name_failures(stream: Any) -> None:
    """Name standard output in errors of writing to it: unbuffered or long text fails in `print`, not in a later
    flush."""

    def naming_it(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            try:
                return function(*args)
            except OSError as error:
                from expertmesh.config.output_file import naming

                with naming(Path("standard output")):
                    raise error

        return called

    if "write" not in vars(stream):  # patched already in this process
        stream.write, stream.flush = naming_it(stream.write), naming_it(stream.flush)


_ELSEWHERE = {
    "chat": "generate MODEL --chat --interactive",
    "complete": "generate",
    "sft": "train",
    "dpo": "train MODEL --objective.name dpo",
    "grpo": "train MODEL --objective.name grpo",
}
"""Verbs of vLLM and TRL, and ours for them."""


def _verb(name: str) -> Callable[[list[str]], int]:
    if name in VERBS:
        return VERBS[name][0]
    if name in FAMILY_VERBS.names:
        return FAMILY_VERBS[name]
    known = [*VERBS, *FAMILY_VERBS]
    if name.startswith("-"):
        if near := difflib.get_close_matches(name, ("--help", "--version", "--debug"), n=1):
            raise ConfigError(f"unknown option {name}; did you mean {near[0]}?")
        raise ConfigError(f"{name}: the first word must be a verb; write it before the options: {', '.join(known)}")
    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    raise ConfigError(f"unknown verb {name!r}; {hint}")


def _is_of_all_ranks(verb: str) -> bool:
    return verb in VERBS_OF_ALL_RANKS or (
        verb not in VERBS and verb in FAMILY_VERBS and FAMILY_VERBS[verb].is_of_all_ranks
    )


def _spelled(error: Exception, verb: str) -> str:
    """Text of an error with the options of a verb as they are typed."""
    from expertmesh.cli.prog_name import Flags

    return Flags(verb).spell(error)


def _report_error(error: Exception, verb: str) -> int:
    """Print the error of a verb on one line and return the exit code."""
    if isinstance(error, PeerError):
        return 1 if another_speaks() else _fail(_spelled(error, verb), 1, follows=True)
    if isinstance(error, CollectiveError):
        code = _fail(_spelled(error, verb), 1, follows=True)
        linger()
        return code
    if isinstance(error, ConfigError | CheckpointError | TrainingDivergedError):
        return _fail(_spelled(error, verb), _MISTAKE if isinstance(error, ConfigError) else 1)
    if isinstance(error, OSError) and error.errno is not None:
        try:
            sys.stdout.flush()
        except OSError:  # otherwise Python retries at exit and prints a traceback
            silence_output()
        return _fail(_os_error_text(error), 1)
    if (needs := _out_of_memory(error, verb)) is not None:
        return _fail(needs, 1)
    return _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug for the traceback", 1)


def _out_of_memory(error: Exception, verb: str) -> str | None:
    """Message for an out-of-memory error of a GPU or of the machine; None: another error. Does not import torch."""
    text = str(error)
    fix = "use a smaller model"
    if verb in ("train", "sweep"):
        fix = "lower --train.micro-batch-size, use --train.activation-checkpointing, or see --dry-run for the parts"
    elif verb in ("generate", "evaluate"):
        fix = "lower --batch-size, or use a smaller model"
    elif verb in FAMILY_VERBS:
        fix = FAMILY_VERBS[verb].memory_fix
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU is out of memory ({text.partition('. ')[2].partition('. ')[0] or text}); {fix}"
    limit = address_limit()
    if limit is not None and any(words in text for words in _SHORT_OF_ADDRESSES):
        error = MemoryError(text)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        if limit is not None:
            fix = f"raise the limit of its address space, {limit / 1e6:,.0f} MB (ulimit -v), or {fix}"
        return f"this {'machine' if limit is None else 'process'} is out of memory; {fix}"
    return None


_SHORT_OF_ADDRESSES = (
    *("annot allocate memory", "an't allocate memory", "failed to map segment", "bad_alloc"),
    *("can't start new thread", "Resource temporarily unavailable", "could not create a primitive"),
)
"""Words of libraries where the address space is short."""


def _os_error_text(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename is not None else ""
    fixes: dict[int | None, str] = {
        errno.ENOSPC: "free some space or choose another folder",
        errno.EDQUOT: "free some space or choose another folder",
        errno.EFBIG: "files may not be so large here: raise the limit (ulimit -f), or choose another disk",
        errno.EACCES: "choose a folder that you may write, or change its permissions",
        errno.EPERM: "choose a folder that you may write, or change its permissions",
        errno.EROFS: "choose a folder on a disk that can be written",
        errno.ENOENT: "check the path",
        errno.EEXIST: "something is in the way: choose another path",
        errno.ENOTDIR: "check the path: a part of it is a file",
        errno.EISDIR: "name a file, not a folder",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ELOOP: "the links lead to one another: name the file itself",
        errno.EIO: "the disk fails: choose another one, and look after this one",
        errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
        errno.ENFILE: "too many files are open on this machine: close some",
    }
    fix = fixes.get(error.errno, "run again with --debug for the traceback")
    return f"{error.strerror}{where}; {fix}"


def _fail(message: str, code: int, *, follows: bool = False) -> int:
    line = "error: " + " ".join(message.split())
    tell(line)
    report_to_elastic(line, is_mistake=code == _MISTAKE, follows=follows)
    return code
