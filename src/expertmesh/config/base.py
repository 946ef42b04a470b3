"""`Config`, the base class of all option groups: frozen, no unknown keys, one-line errors. Never imports torch."""

import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from expertmesh.config.field_texts import field_texts
from expertmesh.config.peer_options import PEER_OPTIONS, how_without
from expertmesh.config.renamed import BOTH_GIVEN, RENAMED, with_current_names
from expertmesh.config.values import (
    LEAST_INT64,
    MOST_INT64,
    WHOLE,
    Number,
    choice_rule,
    shown,
    some_of,
    written,
)
from expertmesh.errors import ConfigError, named

Location = tuple[int | str, ...]
_SCALAR_TYPES = ("int_type", "float_type", "bool_type")
_CHANGE = "change it"  # fix for a value that must be given
KEY_VARIABLE = "EXPERTMESH_API_KEY"
"""Environment variable with an API key of the server, beside the keys of a file."""
UNKNOWN = "unknown option"
EMPTY = ("must not be empty", "give a value, or leave it out")
"""Rule and fix of an empty or blank text, as from an unset variable of a shell: it is no value of any option."""


class FieldError(ConfigError):
    """A configuration field breaks a rule; the message is `field=value: rule; fix` in one line.

    Args:
        location: Names from the outermost configuration down to the field; numbers are places in a tuple.
        near: Dotted name of the option that was meant, of the same configuration; the fix asks for it.
    """

    def __init__(
        self,
        location: Location | str,
        value: object,  # The offending value
        rule: str,  # The rule it breaks
        fix: str = "",  # What to do
        near: str | None = None,
    ) -> None:
        # As given; one name is a location of one
        self.location: Location = (location,) if isinstance(location, str) else location
        self._near = near
        fix = fix if near is None else f"did you mean {named(near)}?"
        super().__init__(dotted(self.location), value, rule, fix)
        self.args = (self.location, value, rule, fix, near)

    def _lead(self, option: str) -> str:
        value, several = self.value, isinstance(self.value, tuple | list)
        typed = " ".join(map(str, self.value)) if several else shown(value)  # type: ignore[call-overload]
        typed = "" if value is True else typed  # a switch
        return named(option, shown(repr(value) if _reads_as_another(value) else value), typed=typed)

    def inside(self, outer: Location) -> "FieldError":
        """A copy of the error whose location begins with `outer`, where a larger configuration holds this one."""
        near = None if self._near is None else dotted((*outer, self._near))
        return FieldError((*outer, *self.location), self.value, self.rule, self.fix, near)


class Fix(NamedTuple):
    """Fix in the errors of a field; stands in its declaration: `count: Annotated[int, Fix("use 1")]`."""

    text: str


_reset: ContextVar[list[str] | None] = ContextVar("_reset", default=None)
"""Names of options that got their defaults; None: options without effect are refused."""


@contextmanager
def saved_run() -> Iterator[list[str]]:
    """Context for validating the configuration of an existing run: options without effect get their defaults, and are
    listed."""
    names: list[str] = []
    token = _reset.set(names)
    try:
        yield names
    finally:
        _reset.reset(token)


class Config(BaseModel):
    """A frozen, validated, torch-free group of options.

    Unknown keys are errors. The text under a field is its help on the command line. A value that breaks a rule raises
    `ConfigError` with one line, from the constructor and from every `model_validate*`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Gives each field the text under it; pydantic's `use_attribute_docstrings` takes five times as long."""
        for name, text in field_texts(cls).items():
            if name in cls.model_fields:
                cls.model_fields[name].description = text

    def __init__(self, **values: Any) -> None:
        """Checks the values.

        Raises:
            ConfigError: A name is unknown or a value breaks a rule.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise first_error(error, type(self)) from None

    # pydantic would call it for each section, and then all validators of the section again
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, values: Any) -> Any:
        """Replaces former option names, as saved runs, files and programs may hold them, by the current ones."""
        former = {old: new for old, new in RENAMED.items() if new in cls.model_fields}
        if not isinstance(values, Mapping) or former.keys().isdisjoint(values):
            return values
        for old, new in former.items():
            if old in values and new in values:
                raise FieldError(old, values[old], f"{BOTH_GIVEN} {new}", "leave it out")
        return with_current_names(values)

    @field_validator("*", mode="before")
    @classmethod
    def _as_python_writes_it(cls, value: Any, info: ValidationInfo) -> Any:
        """Turns paths into texts, one value of several into a list, None into an empty tuple, and the text of a number
        into a choice."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        arms, is_several = get_args(annotation), get_origin(annotation) is tuple
        is_list = isinstance(value, list | tuple)
        values = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in _listed(value)]
        for place, one in enumerate(values):
            if isinstance(one, bool):  # Python takes True for 1
                wanted = _types_in(annotation)
                if bool not in wanted and wanted & {int, float}:
                    what = "a number" if float in wanted else "a whole number"
                    where = (place,) if is_list else ()
                    raise FieldError(where, one, f"must be {what}", "write one")
        if is_list:
            return tuple(values) if isinstance(value, tuple) else values
        if value is None:
            return () if is_several else None
        (one,) = values
        if isinstance(one, str):
            choices = [n for arm in (annotation, *arms) for n in get_args(arm)]
            one = next((n for n in choices if type(n) is int and str(n) == one), one)
        elif isinstance(one, Iterable):
            return one
        is_several |= str not in arms and any(get_origin(arm) is tuple for arm in arms)
        return [one] if is_several else one

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        """Refuses whole numbers beyond int64 (they become sizes and seeds of tensors), empty texts, and those that
        UTF-8 cannot hold."""
        for name in type(self).model_fields:
            value, usual = getattr(self, name), type(self).model_fields[name].default
            for one in _listed(value):
                if isinstance(one, int) and not LEAST_INT64 <= one <= MOST_INT64:
                    rule, way = f"must be at most {written(MOST_INT64)}", "lower"
                    if one < 0:
                        rule, way = f"must be at least {written(LEAST_INT64)}", "raise"
                    raise FieldError(name, one, rule, f"{way} it or leave it out")
                if isinstance(one, str) and one != usual:
                    self._check_text(name, one)
        return self

    def _check_text(self, name: str, text: str) -> None:
        """Refuses a text that is blank, or that no file of a run can hold."""
        if not text.strip():
            raise FieldError(name, text, *EMPTY)
        if not _is_clean(text):
            raise FieldError(
                name,
                ascii(text)[1:-1],
                "must be text in UTF-8 without NUL",
                "rename the file, or name its folder",
            )

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Pydantic's `model_validate`, but raises `ConfigError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise first_error(error, cls) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Pydantic's `model_validate_json`, but raises `ConfigError`."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise first_error(error, cls) from None

    def require(self, holds: object, name: str, rule: str, fix: str) -> None:
        """Raises unless the rule holds for an option; for validators. `name` may be dotted, for an option of a section.

        Raises:
            FieldError: `holds` is false.
        """
        if not holds:
            raise FieldError(tuple(name.split(".")), attrgetter(name)(self), rule, fix)

    def require_once(self, *names: str) -> None:
        """Refuses duplicate entries in these options; for validators.

        Raises:
            FieldError: an entry occurs twice.
        """
        for name in names:
            values = getattr(self, name)
            is_once = len(set(values)) == len(values)
            self.require(is_once, name, "names something twice", "name it once")

    def refuse_idle(self, name: str, rule: str, fix: str) -> None:
        """Refuses another value than the default for an option without effect; for validators. Inside `saved_run` it is
        reset.

        Raises:
            FieldError: the option has another value.
        """
        default, value = type(self).model_fields[name].default, getattr(self, name)
        if value == default:
            return
        if (reset := _reset.get()) is None:
            raise FieldError(name, value, rule, fix)
        reset.append(name)
        object.__setattr__(self, name, default)  # frozen, and not out of its validation yet

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """A validated copy with some values replaced.

        Args:
            changes: New values by dotted name, e.g. `{"train.steps": 20, "model.moe.top_k": 1}`, or in sections: of one
                that is given as a mapping, what is not named stays. A whole configuration takes a section's place.

        Raises:
            ConfigError: A name is unknown, an option is given by its former and its current name, or a value breaks a
                rule.
        """
        values = self.model_dump()
        for name, value in with_current_names(flat_changes(self, changes)).items():
            *sections, field = name.split(".")
            group = values
            for section in sections:
                inner = group.get(section)
                if not isinstance(inner, dict):
                    raise _unknown((name,), value, option_names(type(self)))
                group = inner
            group[field] = value.model_dump() if isinstance(value, Config) else value
        return type(self)(**values)


def flat_changes(config: Config, changes: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Changes to a configuration, sections that are given as mappings flattened to dotted names."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        inner: Any = config
        for part in str(name).split("."):
            inner = getattr(inner, part, None)
        if isinstance(inner, Config) and isinstance(value, Mapping):
            found |= flat_changes(inner, value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def option_names(config_type: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all fields of a configuration, those in sections included."""
    names = []
    for name, field in config_type.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += option_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def nearest_name(name: str, names: list[str]) -> str | None:
    """The known name closest to a mistyped one: what others call so, or by its last part, so that a wrong section is
    found too."""
    if (ours := PEER_OPTIONS.get(name.rsplit(".", 1)[-1])) in names:
        return ours
    leaves = {known.rsplit(".", 1)[-1]: known for known in reversed(names)}
    for wanted, known in ((name, {n: n for n in names}), (name.rsplit(".", 1)[-1], leaves)):
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.75)
        if near:
            return known[near[0]]
    return None


def first_error(error: ValidationError, config_type: type[BaseModel]) -> ConfigError:
    """The first of pydantic's errors in one line; a `FieldError` where one field is wrong."""
    found = error.errors(include_url=False)[0]
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        is_key = found["loc"][-1:] == ("[key]",)
        return cause.inside(found["loc"][:-2] if is_key else found["loc"])
    if isinstance(cause, ConfigError):
        return cause
    if found["type"] in ("json_invalid", "json_type"):
        return FieldError("configuration", found["input"], found["msg"], "restore the file from a copy")
    location, value = found["loc"], found["input"]
    if found["type"] == "extra_forbidden":
        prefix = "".join(f"{part}." for part in location[:-1])
        return _unknown(location, value, option_names(_holder(config_type, location), prefix))
    if found["type"] in ("model_type", "model_attributes_type"):
        rule = "must be a mapping of options to their values"
        inside = next(iter(_holder(config_type, (*location, "")).model_fields), "name")
        fix = f"for example {{{inside!r}: ...}}"
        return FieldError(location or "configuration", value, rule, fix)
    if found["type"] == "missing" and isinstance(location[-1], int):  # a tuple of so many values
        names = tuple(part for part in location if isinstance(part, str))
        several = bare(_holder(config_type, names).model_fields[names[-1]].annotation)
        rule = f"must have {len(get_args(several))} values"
        return FieldError(names, value, rule, _other_value(config_type, names))
    if found["type"] == "missing":
        return FieldError(location, None, "must be given", "give one")
    while isinstance(location[-1], str) and location[-1] not in _holder(config_type, location).model_fields:
        location = location[:-1]  # a member of the field's union type, not a name of an option
    rule, fix = _rule_and_fix(found, _other_value(config_type, location), _limits(config_type, location))
    return FieldError(location, value, rule, fix)


def dotted(location: Location) -> str:
    """`("model", "moe", "num_experts", 1)` as `model.moe.num_experts[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def dotted_values(values: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted name, such as "train.steps"."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= dotted_values(value, f"{prefix}.{name}" if prefix else name)
    return found


def _listed(value: Any) -> list[Any]:
    """The entries of a list or tuple; any other value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _types_in(annotation: Any) -> set[Any]:
    """All classes inside a type annotation, itself included."""
    found = [annotation]
    for one in found:
        found += get_args(one)
    return {one for one in found if isinstance(one, type)}


def _is_clean(text: str) -> bool:
    """Whether a text can be a file name and be written in UTF-8."""
    return "\0" not in text and text.encode(errors="replace").decode() == text


def _reads_as_another(value: object) -> bool:
    """Whether a text without its quotes looks like a number, or like a word of Python's."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return value in ("True", "False", "None")
    return True


def _unknown(location: Location, value: object, names: list[str]) -> FieldError:
    if (fix := how_without(str(location[-1]), names)) is not None:
        return FieldError(location, value, UNKNOWN, fix)
    near = nearest_name(dotted(location), names)
    return FieldError(location, value, UNKNOWN, f"known here: {some_of(names)}", near)


def _holder(config_type: type[BaseModel], location: Location) -> type[BaseModel]:
    for part in location[:-1]:
        inner = config_type.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        config_type = inner
    return config_type


def _other_value(config_type: type[BaseModel], location: Location) -> str:
    """The fix in an error message for a wrong value: the default as an example, or leaving the option out."""
    names = [part for part in location if isinstance(part, str)]
    field = _holder(config_type, tuple(names)).model_fields.get(names[-1]) if names else None
    if field is not None and field.is_required():
        return _CHANGE
    for said in () if field is None else field.metadata:
        if isinstance(said, Fix):
            return said.text
    default = None if field is None else field.get_default(call_default_factory=True)
    if isinstance(default, tuple | dict) and isinstance(location[-1], int):  # one entry is wrong
        default = next(iter(default.values() if isinstance(default, dict) else default), None)
    usable = default is not None and not isinstance(default, BaseModel)
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    return f"for example {shown(default)}" if usable else "change it or leave it out"


def _limits(config_type: type[BaseModel], location: Location) -> dict[str, Any]:
    """Smallest and largest value of an option, as `Number` names them, where both are values themselves."""
    field = _holder(config_type, (*location[:-1], "")).model_fields.get(str(location[-1]))
    found = {} if field is None else {type(rule).__name__: rule for rule in field.metadata}
    limits: dict[str, Any] = {}
    for kind, name in (("Gt", "least"), ("Ge", "least"), ("Le", "most")):
        if kind in found:
            limits[name] = getattr(found[kind], kind.lower())
    if "Gt" in found:
        limits["is_open"] = True
    return {} if "Lt" in found else limits


def _rule_and_fix(found: ErrorDetails, other_value: str, of_field: dict[str, Any]) -> tuple[str, str]:
    """Our words for pydantic's error types; anything else keeps pydantic's own sentence."""
    kind, limits = found["type"], found.get("ctx", {})
    if kind == "literal_error":
        choices = [word.strip("'") for word in limits["expected"].replace(" or ", ", ").split(", ")]
        return choice_rule(found["input"], choices)
    is_scalar = kind in _SCALAR_TYPES and isinstance(found["input"], str | int | float)
    if is_scalar and other_value != _CHANGE and not other_value.startswith("for example"):
        other_value = "give one"  # a text or a fraction, where only a number is one
    comparisons = {
        "greater_than": ("greater than", "gt"),
        "greater_than_equal": ("at least", "ge"),
        "less_than": ("less than", "lt"),
        "less_than_equal": ("at most", "le"),
    }
    if kind in comparisons:
        words, key = comparisons[kind]
        rule = f"must be {words} {written(limits[key])}"
        other_value = other_value.replace(_CHANGE, "raise it" if key[0] == "g" else "lower it")
        if key == "le" and other_value == "for example 0":  # 0 is off, and more was wanted
            other_value = f"for example {limits[key]:g}"
    elif kind == "too_long":
        rule, other_value = f"must have at most {limits['max_length']} entries", "give fewer"
    elif kind.startswith("int_"):
        rule = Number(types=WHOLE, **of_field).rule
    elif kind in ("finite_number", "float_parsing", "float_type"):
        rule = Number(**of_field).rule.replace("a number", "a finite number")
    elif kind.startswith("bool_"):
        rule, other_value = "must be true or false", "choose one"
    else:
        rule = found["msg"][:1].lower() + found["msg"][1:]
    return rule, other_value


def without_none(annotation: Any) -> Any:
    """Type of an option that may be none, without None; any other type as it is."""
    arms = [arm for arm in get_args(annotation) if arm is not NoneType]
    return arms[0] if NoneType in get_args(annotation) else annotation


def bare(annotation: Any) -> Any:
    """Type of an option without None and without rules."""
    kind = without_none(annotation)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_there(path: str | Path) -> bool:
    """Whether something is at a path; False where it cannot be asked, as for a text too long for a file's name."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def expanded(path: str | Path) -> Path:
    """A path with ~ and ~user replaced by the home folder."""
    if not str(path).strip():
        raise ConfigError("path", "''", *EMPTY)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        missing = "home folder; set HOME, or" if Path(path).parts[0] == "~" else "such user;"
        raise ConfigError(f"{path}: there is no {missing} write the whole path") from None


def parse_json(data: bytes | str, *, once: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        once: whether a name that stands twice in an object is refused; else the last one counts.
    """
    try:
        return json.loads(data, object_pairs_hook=_each_once if once else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"has {next(n for n in found if names.count(n) > 1)} twice")
    return found


def cache_root(given: str | None) -> Path:
    """The cache folder that an option names; without one, the user's."""
    return expanded(given) if given else user_cache_dir()


def environment_of_child() -> dict[str, str]:
    """Environment variables for a Python process that imports what this one does."""
    path = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {**os.environ, "PYTHONPATH": path}


def key_of_environment() -> str | None:
    """API key in `KEY_VARIABLE`, without blanks around it; None: it is not set."""
    given = os.environ.get(KEY_VARIABLE)
    return given and given.strip()


def user_cache_dir() -> Path:
    """Folder for files that can be recomputed: $XDG_CACHE_HOME/expertmesh, or ~/.cache/expertmesh."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else expanded("~/.cache")) / "expertmesh"
