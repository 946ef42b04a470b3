"""Options of a verb by their spelling, from the fields of its configuration."""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from expertmesh.config.fields import Operation, Spelling


@dataclass(frozen=True)
class Option:
    """Option of the command line."""

    name: str  # dotted name in the configuration, such as "model.moe.top_k"
    spelled: str  # dotted name on the command line, without the names of flat sections
    field: FieldInfo  # field of the configuration
    spelling: Spelling  # marks of the field
    section: type[BaseModel]  # configuration class that has the field
    default: object = None  # value if it is not given; None: it has none, or must be given

    @property
    def flag(self) -> str:
        """Option as it is typed; a bare word that no option stands for has its name alone."""
        also, spelled = self.spelling.also, self.spelled
        if self.spelling.is_word and not also:
            return spelled.replace("_", "-")
        return flag_name(also[0] if self.spelling.is_word else spelled)

    @property
    def kinds(self) -> tuple[object, ...]:
        """Type of the field, and the members of a union."""
        kind = self.field.annotation
        is_union = typing.get_origin(kind) in (typing.Union, UnionType)
        members = typing.get_args(kind) if is_union else ()
        return tuple(_bare(one) for one in (kind, *members))

    @property
    def is_strict(self) -> bool:
        """Whether the configuration takes no text for a number."""
        return bool(self.section.model_config.get("strict"))

    @property
    def is_each(self) -> bool:
        """Whether the option stands before each of its values."""
        return self.spelling.is_each or self.is_strict

    @property
    def is_bool(self) -> bool:
        """Whether the option is a switch."""
        return set(self.kinds) - {self.field.annotation, NoneType} <= {bool} and bool in self.kinds

    @property
    def is_list(self) -> bool:
        """Whether the option has several values."""
        return any(typing.get_origin(kind) is tuple for kind in self.kinds)

    @property
    def may_be_empty(self) -> bool:
        """Whether the option is a list and nothing else."""
        return typing.get_origin(_bare(self.field.annotation)) is tuple

    @property
    def is_optional(self) -> bool:
        """Whether the option may be none."""
        return NoneType in self.kinds

    @property
    def is_whole(self) -> bool:
        """Whether the option is a whole number."""
        return int in self.kinds and float not in self.kinds


def _bare(kind: object) -> object:
    """Type without its metadata."""
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def flag_name(name: str) -> str:
    """Option as it is typed: `model.moe.top_k` as `--model.moe.top-k`; list indices are dropped."""
    return "--" + name.partition("[")[0].replace("_", "-")


def options_of(
    config: type[BaseModel], name: str = "", spelled: str = "", default: BaseModel | None = None
) -> dict[str, Option]:
    """Options of a configuration by their spelling, former and other names not among them.

    Args:
        name: prefix of the names in the whole configuration, with a dot.
        spelled: prefix of the options on the command line, with a dot.
        default: configuration with the default values; None: defaults of the class.
    """
    found: dict[str, Option] = {}
    own = config.__annotations__
    for field_name in sorted(config.model_fields, key=lambda one: one not in own):
        field = config.model_fields[field_name]
        kind, spelling = field.annotation, Spelling.of(field)
        usual: Any = None
        if default is not None:
            usual = getattr(default, field_name)
        elif not field.is_required():
            usual = field.get_default(call_default_factory=True)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = spelled if spelling.is_flat else f"{spelled}{field_name}."
            inside = options_of(kind, f"{name}{field_name}.", inner, usual)
            hidden = {inner + one for one in spelling.hides}
            found |= {one: option for one, option in inside.items() if one not in hidden}
        else:
            typed = spelled + field_name.rstrip("_")  # a name that pydantic has is written as json_
            option = Option(name + field_name, typed, field, spelling, config, usual)
            found[option.spelled] = option
    return found


def library_names(config: type[BaseModel]) -> Mapping[str, str]:
    """Flag of each option by all names that the library has for it: dotted, without sections, and those it stands
    for."""
    found: dict[str, str] = {}
    for option in options_of(config).values():
        is_flat = option.name != option.spelled
        own = [option.name, *option.spelling.stands_for, *[option.spelled] * is_flat]
        found |= dict.fromkeys(own, option.flag)
    return found


def entry_kind(option: Option) -> object:
    """Type of an option's value, or of each of several."""
    kinds = [kind for kind in option.kinds if kind not in (NoneType, option.field.annotation)]
    kind = next(iter(kinds), _bare(option.field.annotation))
    several = next((k for k in option.kinds if typing.get_origin(k) is tuple), None)
    kind = _bare(typing.get_args(several)[0]) if several is not None else kind
    origin = typing.get_origin(kind)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return dict if is_mapping else kind


def declared_by(module: str) -> list[type[Operation]]:
    """Verbs that a module declares or continues."""
    values = vars(import_module(module)).values()
    kinds = [one for one in values if isinstance(one, type) and issubclass(one, Operation)]
    return [kind for kind in kinds if kind.__name__.endswith("Verb")]
