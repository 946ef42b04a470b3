"""Tutel's names that have no counterpart here: one table, with what to use instead."""

import os
from collections.abc import Callable
from typing import NoReturn

from expertmesh.errors import ConfigError

REFUSED = {
    "tutel.jit": "kernels of your own are compiled by torch.utils.cpp_extension or triton",
    "tutel.launcher": "start the script with torchrun --nproc-per-node N",
    "tutel.checkpoint": "use `expertmesh convert`, or state_dict on one process",
    "tutel.parted": "use `expertmesh plan`, which chooses degrees of parallelism",
    "tutel.ops": "use expertmesh.functional",
    "tutel.custom": "kernels are built into expertmesh; leave it out",
    "tutel.experts": "give `experts` of moe_layer a type, or 'custom' with a module",
    "tutel.gates": "give `gate_type` of moe_layer a type, or 'custom' with a module",
    "tutel.impls": "use the names of moe and net",
    "tutel.jit_kernels": "use the names of moe",
    "tutel.moe.get_topk_selection": "use torch.topk, or expertmesh.functional.choose_experts",
    "tutel.moe.get_reversed_sample_ids": "use expertmesh.functional.route_metadata",
    "tutel.system.init_affinity_at_program_beginning": "start with torchrun --numa-binding node",
}
"""Tutel's names, with the way out. Names of modules stand for all that is in them."""

ENVIRONMENT = {
    "SKIP_MOE": "leave the layer out of the model",
    "SKIP_EXPERT": "measure phases with torch.profiler",
    "SKIP_A2A": "measure phases with torch.profiler",
}
"""Tutel's switches that would change what the layer computes, with the way out."""


def refusing(module: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of the door's module that stands for a module of Tutel."""

    def missing(name: str) -> NoReturn:
        full = f"{module}.{name}"
        if full in REFUSED:
            raise ConfigError(f"{full} has no counterpart here; {REFUSED[full]}")
        raise AttributeError(f"module {module!r} of the door has no attribute {name!r}")

    return missing


def refuse_switches() -> None:
    """Raise ConfigError for a switch of Tutel's that is set in the environment and has no counterpart."""
    for name, way_out in ENVIRONMENT.items():
        if os.environ.get(name, "0") not in ("", "0"):
            raise ConfigError(
                f"{name}={os.environ[name]}: this switch of Tutel has no effect here; unset it, and {way_out}"
            )
