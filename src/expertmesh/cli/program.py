"""How this program is called here, for the commands that messages suggest."""

import os
import re
import shutil
import sys
from pathlib import Path

_VERBS = "train|generate|report|export|doctor|translate"


def program() -> str:
    """`expertmesh` where that name leads here, because its environment is activated; else the path to it."""
    own = Path(sys.executable).with_name("expertmesh")
    found = shutil.which("expertmesh")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "expertmesh"
    near = os.path.relpath(own)
    return str(own) if near.startswith("..") else near


def spell_program(text: str) -> str:
    """A message whose commands of this program can be copied as they stand."""
    return re.sub(rf"(?<![\w./-])expertmesh (?={_VERBS})", lambda _: f"{program()} ", text)
