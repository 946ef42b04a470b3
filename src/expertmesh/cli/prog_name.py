"""Name of this program in messages, and their command-line spelling of options and commands."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.config.engine import EngineConfig
from expertmesh.config.load import LoadConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.config.server import ServerConfig
from expertmesh.errors import Line

_DECODING = {"parallel.es_degree": "es-degree"}
_EPLB = ("enable_eplb", "num_redundant_experts", "eplb_step_interval")
_OF_VERBS = {
    "generate": _DECODING | {name: name for name in (*_EPLB, "num_draft_tokens")},
    "evaluate": _DECODING,
    "serve": {name: name for kind in (ServerConfig, EngineConfig) for name in kind.model_fields},
    "bench": {name: name for name in LoadConfig.model_fields},
    "quantize": {"source": "run", "target": "to"},
}
"""Options of the library that a verb of the core has under another name."""
_ARGUMENTS = {
    *("to", "from", "max_tokens", "output", "page", "plot", "picture", "tasks", "keep", "rates"),
    *("cluster", "goal", "tokens_per_batch", "max_context", "tokens", "imbalance", "states"),
    *("pp", "vpp", "batch", "context", "measured"),
    *("expert_slots", "group_size", "calibration", "overwrite"),
    *("device", "temperature", "top_k", "top_p", "length_penalty", "seed", "family", "split_long"),
}
"""Function arguments that are options of verbs; other names without a section come from a file that was read."""


def prog_name() -> str:
    """Program name: `expertmesh` if it is on the PATH (activated environment), else its path."""
    own = Path(sys.executable).with_name("expertmesh")
    found = shutil.which("expertmesh")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "expertmesh"
    near = os.path.relpath(own)
    return str(own) if near.startswith("..") else near


def flag_name(name: str) -> str:
    """Option as it is typed: `model.moe.top_k` as `--model.moe.top-k`; list indices are dropped."""
    return "--" + name.partition("[")[0].replace("_", "-")


class Flags:
    """Command-line spelling of options and commands in errors and notes.

    Args:
        verb: the current verb, which may have other names for options.
    """

    def __init__(self, verb: str = "") -> None:
        self._own: Mapping[str, str] = _OF_VERBS.get(verb, {})
        if verb and verb not in _OF_VERBS and verb in FAMILY_VERBS:
            self._own = FAMILY_VERBS[verb].flags

    def option(self, name: str, value: str | None) -> str:
        """Spelling of an option, such as `--train.steps 20`. A degree without a section, as in functions, gets its section."""
        if name in ParallelConfig.model_fields:
            name = f"parallel.{name}"
        own = self._own.get(name, name)
        if name not in self._own and "." not in name and name not in _ARGUMENTS:
            return name if value is None else f"{name}={value}"
        flag = flag_name(own)
        return flag if not value else f"{flag} {value}"

    def command(self, words: str) -> str:
        """Command that can be copied to a shell."""
        return f"{prog_name()} {words}"

    def spell(self, told: object) -> str:
        """Text of an error or a `Line` in this spelling; other objects as str."""
        line = told if isinstance(told, Line) else getattr(told, "line", None)
        return str(told) if line is None else line.spelled(self)
