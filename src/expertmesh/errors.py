"""The exceptions that ExpertMesh raises on purpose, in one leaf module, and how their lines name options and commands.

A line that names an option does it by `named`, and a command by `command`, so that each reader gets a spelling of his own:
Python `train.resume=auto`, the command line `--train.resume auto`.
"""

from typing import Any, Protocol

_MARK, _BETWEEN = "\x02", "\x03"
_OPTION, _COMMAND = "option", "command"
_ABSENT: Any = object()


class Speller(Protocol):
    """How options and commands are written."""

    def option(self, name: str, value: str | None) -> str:
        """An option.

        Args:
            name: dotted, as in the configuration; an argument of a function has no dot.
            value: None: it is named alone.
        """
        ...

    def command(self, words: str) -> str:
        """A command of this package, given the words after its program's name."""
        ...


class _Python:
    def option(self, name: str, value: str | None) -> str:
        return name if value is None else f"{name}={value}"

    def command(self, words: str) -> str:
        return f"expertmesh {words}"


def named(option: str, value: object = _ABSENT, *, typed: str | None = None) -> str:
    """An option inside the text of a `Line` or an error.

    Args:
        option: its dotted name.
        value: that it has, or should get; without one the option is named alone.
        typed: the value as it is typed on a command line, nothing for a switch that is on; None: as in Python.
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
    """A command of this package inside the text of a `Line` or an error: `command("train --help")`."""
    return f"{_MARK}{_COMMAND}{_BETWEEN}{words}{_MARK}"


class Line:
    """A text whose options and commands are spelled when it is printed: by `str` as Python writes them.

    Args:
        text: with options by `named`, commands by `command`.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        """The text as Python users read it."""
        return self.spelled(_Python())

    def spelled(self, by: Speller) -> str:
        """The text with options and commands as `by` writes them."""
        return "".join(_spelled(part, by) for part in self.text.split(_MARK))


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
    """An error whose text is a `Line`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.line = Line(text)

    def __str__(self) -> str:
        return str(self.line)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def text_of(error: BaseException) -> str:
    """What an error says, on one line, its options and commands not spelled yet, so that another error can say it."""
    line = error.line.text if isinstance(error, _LineError) else f"{type(error).__name__}: {error}"
    return " ".join(line.split())


class ConfigError(_LineError, ValueError):
    """A value given by the user breaks a rule.

    The message is one line and says the value, the rule and the fix; the command line prints it with options as
    they are typed there.

    Args:
        option: its dotted name (`train.steps`), or, alone, the whole line of what concerns no option.
        value: that it has.
        rule: that the value breaks.
        fix: what to do; "": the rule says it.

    Attributes:
        option: the name; None where only a line was given.
        value: the value.
        rule: the rule; other options in it are written by `named`.
        fix: the fix, in the same way.
        line: all of it.

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
    """A checkpoint is missing, damaged or of another model; the message names the file and the fix.

    Example:
        >>> try:
        ...     model, tokenizer = em.load("runs/text")
        ... except em.CheckpointError as error:
        ...     print("train it first:", error)
    """


class TrainingDivergedError(_LineError, RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient; names the last good checkpoint.

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
    """Ranks lost one another: a collective failed or timed out; names the rank, the layer, the collective and its ranks.

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
    """Another rank failed: says which one and why. A rank that stops for this is quiet where that one is heard."""
