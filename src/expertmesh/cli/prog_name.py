"""Name of this program in messages, and their command-line spelling of options and commands."""

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.options import declared_by, flag_name, library_names
from expertmesh.errors import Line


def prog_name() -> str:
    """Program name: `expertmesh` if it is on the PATH (activated environment), else its path."""
    own = Path(sys.executable).with_name("expertmesh")
    found = shutil.which("expertmesh")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "expertmesh"
    near = os.path.relpath(own)
    return str(own) if near.startswith("..") else near


def _names_of(verb: str) -> dict[str, str]:
    """Flags of a verb by the names that the library has for them."""
    module = f"expertmesh.cli.{verb.replace(' ', '_')}"
    if verb in FAMILY_VERBS:
        module = FAMILY_VERBS[verb].run.partition(":")[0]
    elif not verb.replace(" ", "").isidentifier() or find_spec(module) is None:
        return {}
    return {k: v for kind in declared_by(module) for k, v in library_names(kind).items()}


class Flags:
    """Command-line spelling of options and commands in errors and notes.

    Args:
        verb: the current verb, whose options need no section.
        names: flags of its options by the names that the library has for them; None: as the verb declares.
    """

    def __init__(self, verb: str = "", names: Mapping[str, str] | None = None) -> None:
        self._own = _names_of(verb) if names is None else names

    def option(self, name: str, value: str | None) -> str:
        """Spelling of an option, such as `--train.steps 20`. A degree without a section, as in functions, gets its
        section."""
        from expertmesh.config.run import ParallelConfig

        name = name.partition("[")[0]
        own = self._own.get(name)
        if own is None and name in ParallelConfig.model_fields:
            own = self._own.get(f"parallel.{name}", flag_name(f"parallel.{name}"))
        if own is None and "." not in name:
            return name if value is None else f"{name}={value}"
        flag = own or flag_name(name)
        return flag if not value else f"{flag} {value}"

    def command(self, words: str) -> str:
        """Command that can be copied to a shell."""
        return f"{prog_name()} {words}"

    def spell(self, text: object) -> str:
        """Text of an error or a `Line` in this spelling; other objects as str."""
        line = text if isinstance(text, Line) else getattr(text, "line", None)
        return str(text) if line is None else line.spelled(self)
