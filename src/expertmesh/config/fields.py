"""Types of options, each with its rule and its spelling on the command line. Never imports torch.

A verb is an `Operation` whose fields have these types: `cli/parse.py` reads its words, `cli/help.py` writes its help.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from expertmesh.config.base import EMPTY, Config, FieldError
from expertmesh.config.launched import launched_rank
from expertmesh.config.output_file import output_file


@dataclass(frozen=True)
class Spelling:
    """Spelling of an option on the command line."""

    metavar: str = ""  # placeholder of its value in help; "": by its type
    also: tuple[str, ...] = ()  # other names of the option, which are read and not shown
    stands_for: tuple[str, ...] = ()  # names under which functions of the library know it
    hides: frozenset[str] = frozenset()  # options of a section that are not on the command line
    is_word: bool = False  # whether it is given as a bare word, in the order of the fields
    is_each: bool = False  # whether the option stands before each of several values, which may have blanks and commas
    is_flat: bool = False  # whether the options of a section are written without its name
    is_read: bool = False  # whether it names files that are read
    is_written: bool = False  # whether it names a file that is written
    is_options: bool = False  # whether it names a file with values of the other options
    is_free: bool = False  # whether its text may be blank, as a prompt

    @classmethod
    def of(cls, field: FieldInfo) -> Self:
        """Spelling of a field: all spellings in its type, an outer one before an inner one."""
        found = cls()
        for one in (*_inside(field.annotation), *field.metadata):
            if isinstance(one, cls):
                found = replace(found, **one._given())
        return found

    def _given(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value}


def _inside(kind: Any) -> Iterator[Any]:
    """Metadata inside a type, from the innermost outwards."""
    for one in get_args(kind):
        yield from _inside(one)
    yield from getattr(kind, "__metadata__", ())


Positive = Annotated[int, Field(ge=1)]
"""Whole number of at least 1."""
Count = Annotated[int, Field(ge=0)]
"""Whole number of at least 0."""
Ratio = Annotated[float, Field(ge=0)]
"""Number of at least 0."""
Word = Spelling(is_word=True)
"""Mark of an option that is a bare word."""
Flat = Spelling(is_flat=True)
"""Mark of a section whose options are written without its name."""
Each = Spelling(is_each=True)
"""Mark of a list whose option stands before each value."""
ModelFolder = Annotated[str, Spelling("RUN", also=("run", "run_dir"), is_word=True)]
"""Folder of a run, or of a model as the hub has it. `--run-dir` is for torchrun, which takes `--run` for its own
`--run-path`."""
Folder = Annotated[str, Spelling("DIR")]
"""Folder."""
InputFile = Annotated[str, Spelling("FILE", is_read=True)]
"""File that is read."""
OptionsFile = Annotated[str, Spelling("FILE", is_read=True, is_options=True)]
"""YAML or JSON file with values of the other options, which win over it."""
NewFile = Annotated[str, Spelling("FILE", is_written=True)]
"""File that is written: a regular one, in a folder that is there, and none that the same call reads."""
Device = Annotated[str, Spelling("NAME")]
"""Device of torch: auto, cpu, cuda or cuda:N."""
WeightDtype = Literal["float32", "bfloat16", "float16", "float64"]
"""Type of weights and products."""


class Operation(Config):
    """A verb: its options and words as fields, its help as docstring, with examples after an empty line.

    Files that are written are checked when it is made, on rank 0.

    Example:
        >>> class Count(Operation):
        ...     run: ModelFolder
        ...     output: NewFile | None = None
        >>> Count(run="runs/demo").output is None
        True
    """

    def _check_text(self, name: str, text: str) -> None:
        """Refuses a blank text; names of files need not be UTF-8, for nothing of a verb is stored."""
        if not text.strip() and not Spelling.of(type(self).model_fields[name]).is_free:
            raise FieldError(name, text, *EMPTY)

    @model_validator(mode="after")
    def _check_written(self) -> Self:
        if launched_rank()[0] > 0:
            return self
        spelled = {name: Spelling.of(field) for name, field in type(self).model_fields.items()}
        read = [one for name in spelled if spelled[name].is_read for one in _all(getattr(self, name))]
        for name, spelling in spelled.items():
            if spelling.is_written:
                for one in _all(getattr(self, name)):
                    output_file(name, one, read=read)
        return self


def _all(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


class DataPlace(Config):
    """Data of the run."""

    path: Annotated[tuple[str, ...] | None, Spelling("PATH")] = None
    """folders or files with the run's data (default: as in training)"""
