"""Reward functions of users: loaded by name, called with TRL's keywords, checked; a mistake in one is an error of one
line."""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from expertmesh.config.base import expanded
from expertmesh.errors import ConfigError, named, text_of

OPTION = "reward.functions"
_SPEC = re.compile(r"(?P<place>[^:]+):(?P<name>[A-Za-z_]\w*)(?::(?P<weight>[-+.\deE]+))?")
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class RewardFunction:
    """A function that rewards answers."""

    name: str  # its name in measures
    function: Callable[..., Any]  # called with keywords; returns one number, or None, per answer
    weight: float = 1.0  # factor of its values in the reward
    digest: str = ""  # digest of its source; "" for functions of this package

    @property
    def where(self) -> str:
        """File and line of the function."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "

    def failed(self, problem: str) -> ConfigError:
        """Error of one line with the place of the function."""
        return ConfigError(f"{OPTION}: {self.where}{self.name} {problem}")


@dataclass(frozen=True)
class Answered:
    """Answers to be rewarded, G to each prompt, neighbours."""

    prompts: Sequence[Any]  # prompt of each answer as the data have it: a text, or messages
    completions: Sequence[Any]  # answers in the form of the prompt: texts, or messages of the assistant
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]  # other columns of the data by name, a value per answer
    where: Sequence[str]  # place of each answer's prompt in the data
    state: Any = None  # state of the run: `global_step`, from 0


def find_rewards(specs: Sequence[str], *, forbidden: Path | None = None) -> list[RewardFunction]:
    """Reward functions by their names in `reward.functions`; files are imported, once per process.

    Args:
        forbidden: folder of a model, whose code is never run.
    """
    if not specs:
        fix = "name one: FILE.py:NAME, package.module:NAME, exact or number"
        raise ConfigError(OPTION, "none", "reinforcement learning needs a reward", fix)
    found = [_find(spec, forbidden) for spec in specs]
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(OPTION, twice[0], "is given twice", "rename one of the functions")
    if not any(one.weight for one in found):
        raise ConfigError(
            OPTION,
            " ".join(specs),
            "have weights of 0, and teach nothing",
            "give one another weight",
        )
    return found


def _find(spec: str, forbidden: Path | None) -> RewardFunction:
    name, _, weight = spec.partition(":")
    if name in OWN and (not weight or _is_number(weight)):
        return RewardFunction(name, OWN[name], float(weight or 1))
    match = _SPEC.fullmatch(spec)
    if match is None or not (match["weight"] is None or _is_number(match["weight"])):
        known = ", ".join(OWN)
        rule = f"is neither FILE.py:NAME, package.module:NAME, {known}, nor one of them with a weight"
        raise ConfigError(OPTION, spec, rule, "for example rewards.py:correct:0.5")
    place, name = match["place"], match["name"]
    is_file = place.endswith(".py")
    module = _module_of_file(spec, place, forbidden) if is_file else _module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(OPTION, spec, f"{place} has no function {name}", "correct the name")
    digest = ""
    if (source := getattr(module, "__file__", None)) is not None:
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return RewardFunction(name, function, float(match["weight"] or 1), digest)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _module_of_file(spec: str, place: str, forbidden: Path | None) -> Any:
    """The module of a file, imported once per process for each content."""
    path = expanded(place).resolve()
    if not path.is_file():
        raise ConfigError(OPTION, spec, f"there is no file {place}", "correct the path")
    inside = [path.parent, *path.parents]
    is_model = forbidden is not None and forbidden.resolve() in inside
    if is_model or any((folder / "config.json").is_file() for folder in inside[:1]):
        why = "is in the folder of a model, whose code is never run"
        raise ConfigError(OPTION, spec, why, "copy the file to a folder of your own, and read it")
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"expertmesh_rewards_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    described = importlib.util.spec_from_file_location(name, path)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[name] = module  # dataclasses and pickles look it up
    try:
        _imported(spec, partial(described.loader.exec_module, module))
    except ConfigError:
        del sys.modules[name]
        raise
    return module


def _module(spec: str, place: str) -> Any:
    return _imported(spec, partial(importlib.import_module, place))


def _imported(spec: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # whatever a user's module does while it is imported
        problem = f"cannot be imported ({_line_of(error)}{text_of(error)})"
        raise ConfigError(OPTION, spec, problem, "repair it") from error


def _line_of(error: BaseException) -> str:
    """File and line where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def rewarded(
    functions: Sequence[RewardFunction],
    answered: Answered,
    *,
    timeout: float,  # maximum seconds of all calls
    log: Callable[[str, float], None] = lambda name, value: None,
) -> dict[str, list[float | None]]:
    """Values of every function for every answer, by the functions' names; async functions run together.

    Args:
        log: called with name and value of a measure that a function logs (`log_metric`).

    Returns:
        For each function one number per answer, or None where it does not apply.
    """
    found: dict[str, Any] = {}
    errors: list[BaseException] = []
    running = list(functions[:1])

    async def all_of_them() -> None:
        awaited = []
        for one in functions:
            running[:] = [one]
            value = _called(one, answered, log)
            if inspect.isawaitable(value):
                awaited.append((one, value))
            else:
                found[one.name] = value
        running[:] = [one for one, _ in awaited] or running
        await asyncio.gather(*(_awaited(one, value, found) for one, value in awaited))

    def run() -> None:
        try:
            asyncio.run(all_of_them())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="reward functions", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        late = next((one for one in running if one.name not in found), running[0])
        rule = f"has not answered within reward.timeout={timeout:g} s"
        raise late.failed(f"{rule}; make it faster, or raise the time")
    if errors:
        raise errors[0]
    return {one.name: _checked(one, found[one.name], answered) for one in functions}


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """Check, before an answer is written, that functions get what they ask for by name, and data what they name."""
    if hidden := sorted(_KEYWORDS & set(columns)):
        raise ConfigError(
            f"{named('data.path')}: has a column {hidden[0]!r}, which reward functions know as something else; rename "
            "the column"
        )
    for one in functions:
        for name, parameter in _parameters(one).items():
            is_needed = parameter.default is parameter.empty and parameter.kind in _BY_NAME
            if is_needed and name not in _KEYWORDS and name not in columns:
                known = ", ".join(sorted(columns)) or "none"
                raise one.failed(f"needs a column {name!r}, and the data's are: {known}; name one so")


_KEYWORDS = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
"""Keywords that reward functions get beside the columns."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that are given by their names."""


def _parameters(one: RewardFunction) -> Mapping[str, inspect.Parameter]:
    with suppress(TypeError, ValueError):  # a builtin without a signature
        return inspect.signature(one.function).parameters
    return {}


def _called(one: RewardFunction, answered: Answered, log: Callable[[str, float], None]) -> Any:
    values = {
        "prompts": list(answered.prompts),
        "completions": list(answered.completions),
        "completion_ids": [list(ids) for ids in answered.completion_ids],
        "trainer_state": answered.state,
        "log_metric": log,
        "log_extra": lambda name, values: None,
    }
    given = {name: list(column) for name, column in answered.columns.items()} | values
    parameters = _parameters(one)
    kinds = {parameter.kind for parameter in parameters.values()}
    if parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        given = {name: value for name, value in given.items() if name in parameters}
    try:
        return one.function(**given)
    except Exception as error:  # whatever a user's function does
        raise _raised(one, error) from error


async def _awaited(one: RewardFunction, value: Any, found: dict[str, Any]) -> None:
    try:
        found[one.name] = await value
    except Exception as error:  # whatever a user's function does
        raise _raised(one, error) from error


def _raised(one: RewardFunction, error: Exception) -> ConfigError:
    return one.failed(f"raised at {_line_of(error)}{text_of(error)}; repair it")


def _checked(one: RewardFunction, values: Any, answered: Answered) -> list[float | None]:
    count = len(answered.completions)
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        kind = type(values).__name__
        raise one.failed(f"returned {kind}; return a list of {count} numbers, one per answer")
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != count:
        raise one.failed(f"returned {len(values)} values for {count} answers; return one for each")
    for place, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, Real) or not math.isfinite(value):
            shown = f"{type(value).__name__} {value!r}"[:60]
            fix = "return a finite number, or None where it does not apply"
            raise one.failed(f"returned {shown} for an answer to {answered.where[place]}; {fix}")
    return [None if value is None else float(value) for value in values]


def total(
    functions: Sequence[RewardFunction],
    values: Mapping[str, Sequence[float | None]],
    answered: Answered,
) -> list[float]:
    """Reward of every answer: sum of weight x value over the functions that apply."""
    found = []
    for place, where in enumerate(answered.where):
        each = [(one.weight, values[one.name][place]) for one in functions]
        applying = [weight * value for weight, value in each if value is not None]
        if not applying:
            raise functions[-1].failed(
                f"and all other functions returned None for an answer to {where}; let one return a number"
            )
        found.append(math.fsum(applying))
    return found


def text_of_completion(completion: Any) -> str:
    """Text of an answer, which may be messages of the assistant."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the answer's text equals column `answer`, without blanks around them; else 0."""
    texts = [text_of_completion(one).strip() for one in completions]
    return [float(said == str(right).strip()) for said, right in zip(texts, answer, strict=True)]


def number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last number of the answer is the last one of column `answer`; else 0."""
    pairs = zip(completions, answer, strict=True)
    found = [(_last_number(text_of_completion(a)), _last_number(str(b))) for a, b in pairs]
    return [float(said is not None and said == right) for said, right in found]


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


OWN: dict[str, Callable[..., Any]] = {"exact": exact, "number": number}
"""Reward functions of this package."""
