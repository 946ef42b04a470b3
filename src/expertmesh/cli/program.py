"""How this program is called here, for the commands that messages suggest."""

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path


def program() -> str:
    """`expertmesh` where that name leads here, because its environment is activated; else the path to it."""
    own = Path(sys.executable).with_name("expertmesh")
    found = shutil.which("expertmesh")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "expertmesh"
    near = os.path.relpath(own)
    return str(own) if near.startswith("..") else near


def spell_program(text: str, verbs: Iterable[str]) -> str:
    """A message whose commands of this program can be copied as they stand; behind `-m` it is a module's name and stays.

    Args:
        text: the message.
        verbs: of the program; where none follows its name, no command is meant.
    """
    return re.sub(
        rf"(?<![\w./-])(?<!-m )expertmesh (?=(?:{'|'.join(verbs)})\b)",
        lambda _: f"{program()} ",
        text,
    )
