"""How this program is called here, for the commands that messages suggest."""

import os
import re
import shutil
import sys
from pathlib import Path

_VERBS = "train|sweep|generate|translate|classify|report|export|convert|experts|evaluate|data|doctor|bench"


def program() -> str:
    """`expertmesh` where that name leads here, because its environment is activated; else the path to it."""
    own = Path(sys.executable).with_name("expertmesh")
    found = shutil.which("expertmesh")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "expertmesh"
    near = os.path.relpath(own)
    return str(own) if near.startswith("..") else near


def spell_program(text: str) -> str:
    """A message whose commands of this program can be copied as they stand; behind `-m` it is a module's name and stays."""
    return re.sub(
        rf"(?<![\w./-])(?<!-m )expertmesh (?=(?:{_VERBS})\b)", lambda _: f"{program()} ", text
    )
