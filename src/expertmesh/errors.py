"""Exceptions of ExpertMesh, and the spelling of options and commands in their messages.

Messages refer to options with `named` and to commands with `command`. They are spelled when printed:
`train.resume=auto` in Python, `--train.resume auto` on the command line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

_MARK, _BETWEEN = "\x02", "\x03"
_OPTION, _COMMAND = "option", "command"
_ABSENT: Any = object()


class Speller(Protocol):
    """Spelling of options and commands."""

    def option(self, name: str, value: str | None) -> str:
        """Spelling of an option.

        Args:
            name: dotted name as in the configuration; arguments of functions have no dot.
            value: its value; None: the name alone.
        """
        ...

    def command(self, words: str) -> str:
        """Spelling of a command of this package, given the words after the program's name."""
        ...


class _Python:
    def option(self, name: str, value: str | None) -> str:
        return name if value is None else f"{name}={value}"

    def command(self, words: str) -> str:
        return {"train": "em.train(...)"}.get(words, f"expertmesh {words}")


def named(option: str, value: object = _ABSENT, *, typed: str | None = None) -> str:
    """Placeholder of an option in the text of a `Line` or an error.

    Args:
        value: current or suggested value; if left out, the name alone.
        typed: value as typed on a command line, "" for a switch that is on; None: as in Python.
    """
    parts = [_OPTION, option]
    if value is not _ABSENT:
        if typed is None:  # a switch
            typed = str(value) if not isinstance(value, bool) else "" if value else "false"
        parts += [_clean(value), _clean(typed)]
    return f"{_MARK}{_BETWEEN.join(parts)}{_MARK}"


def _clean(value: object) -> str:
    return str(value).replace(_MARK, " ").replace(_BETWEEN, " ")


def command(words: str) -> str:
    """Placeholder of a command in the text of a `Line` or an error: `command("train --help")`."""
    return f"{_MARK}{_COMMAND}{_BETWEEN}{words}{_MARK}"


class Line:
    """Text whose options and commands are spelled when it is printed; `str` uses Python's spelling."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        """Text in Python's spelling."""
        return self.spelled(_Python())

    def spelled(self, by: Speller) -> str:
        """Text in the spelling of `by`."""
        return "".join(_spelled(part, by) for part in self.text.split(_MARK))


_speller: ContextVar[Speller] = ContextVar("speller", default=_Python())  # noqa: B039  it has no state


@contextmanager
def spelling(by: Speller) -> Iterator[None]:
    """Context in which `printed` spells options and commands as `by` does; outside it is Python's spelling."""
    token = _speller.set(by)
    try:
        yield
    finally:
        _speller.reset(token)


def printed(text: str) -> str:
    """Text with options from `named` and commands from `command` as they are spelled here; see `spelling`."""
    return Line(text).spelled(_speller.get())


def _spelled(part: str, by: Speller) -> str:
    match part.split(_BETWEEN):
        case [kind, name, value, typed] if kind == _OPTION:
            return by.option(name, value if isinstance(by, _Python) else typed)
        case [kind, name] if kind == _OPTION:
            return by.option(name, None)
        case [kind, words] if kind == _COMMAND:
            return by.command(words)
    return part


class _LineError(Exception):
    """Error whose message is a `Line`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.line = Line(text)

    def __str__(self) -> str:
        return str(self.line)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def text_of(error: BaseException) -> str:
    """Message of an error on one line with unspelled options and commands, for use in another error's message."""
    line = error.line.text if isinstance(error, _LineError) else f"{type(error).__name__}: {error}"
    return " ".join(line.split())


class ConfigError(_LineError, ValueError):
    """Invalid value from the user.

    The message is one line with the value, the rule and the fix; the command line prints options as they are typed
    there.

    Args:
        option: dotted name of the option (`train.steps`); as the only argument, the whole line.
        value: its value.
        rule: the broken rule.
        fix: the fix; "": the rule implies it.

    Attributes:
        option: the name; None if only a line was given.
        value: the value.
        rule: the rule; refers to other options with `named`.
        fix: the fix, likewise.
        line: the whole message.

    Example:
        >>> try:
        ...     em.recipe("gpt-moe-test", {"train.stepz": 3})
        ... except em.ConfigError as error:
        ...     print(error)
        train.stepz=3: unknown option; did you mean train.steps?
    """

    def __init__(self, option: str, value: object = _ABSENT, rule: str = "", fix: str = "") -> None:
        self.option = option if rule else None
        self.value = None if value is _ABSENT else value
        self.rule, self.fix = rule, fix
        super().__init__(f"{self._lead(option)}: {rule}{'; ' * bool(fix)}{fix}" if rule else option)
        self.args = (option, value, rule, fix) if rule else (option,)

    def _lead(self, option: str) -> str:
        value = self.value
        if isinstance(value, tuple | list):
            value = " ".join(map(str, value))
            return named(option, value or "()", typed=value or "none")
        return named(option, value)


class CheckpointError(_LineError, RuntimeError):
    """Missing or damaged checkpoint, or one of another model; the message names the file and the fix.

    Example:
        >>> try:
        ...     model, tokenizer = em.load("runs/text")
        ... except em.CheckpointError as error:
        ...     print("train it first:", error)
    """


class TrainingDivergedError(_LineError, RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient; the message names the last good checkpoint.

    Example:
        >>> config = em.recipe("gpt-moe-test", {"data.path": "corpus.txt", "train.run_dir": "runs/gone"})
        >>> wild = config.updated({"model.init_std": 1e38, "train.max_bad_steps": 2})
        >>> try:
        ...     em.train(wild, quiet=True)
        ... except em.TrainingDivergedError as error:
        ...     print("lower the learning rate and begin anew")
        lower the learning rate and begin anew
    """


class CollectiveError(_LineError, RuntimeError):
    """A collective failed or timed out; the message names the rank, the layer, the collective and its ranks.

    Example:
        >>> def train_and_log(config):
        ...     try:
        ...         return em.train(config, quiet=True)
        ...     except em.CollectiveError as error:
        ...         print("torchrun starts all ranks again:", error)
        ...         raise
        >>> config = em.recipe("gpt-moe-test", {"data.path": "corpus.txt", "train.run_dir": "runs/text"})
        >>> train_and_log(config.updated({"train.resume": "auto"})).step
        20
    """


class PeerError(_LineError, RuntimeError):
    """Failure of another rank, named with its reason. A rank that stops for this prints nothing if the other rank's
    error is printed."""
