"""Tutel's names that have no counterpart here: one table, with what to use instead."""

import os
from functools import partial

from expertmesh.config import no_counterpart
from expertmesh.errors import ConfigError

REFUSED = {
    "tutel.jit.create_cuda_kernel": "compile kernels of your own with torch.utils.cpp_extension or triton",
    "tutel.launcher.execl": "start the script with torchrun --nproc-per-node N",
    "tutel.system_init": "use the names of system",
    "tutel.parted": "use `expertmesh plan`, which chooses degrees of parallelism",
    "tutel.ops": "use expertmesh.functional",
    "tutel.custom": "kernels are built into expertmesh; leave it out",
    "tutel.experts": "give `experts` of moe_layer a type, or 'custom' with a module",
    "tutel.gates": "give `gate_type` of moe_layer a type, or 'custom' with a module",
    "tutel.impls": "use the names of moe and net",
    "tutel.jit_kernels": "use the names of moe",
    "tutel.system.from_url": "download the file, and read it with system.load",
    "tutel.system.init_affinity_at_program_beginning": "start with torchrun --numa-binding node",
}
"""Tutel's names, with the way out. Names of modules stand for all that is in them."""

HONOURED = {
    "CAP_FACTOR": "capacity factor of gates that give none",
    "BATCH_PRIO": "tokens with the largest weights are served first",
    "TUTEL_GLOBAL_TIMEOUT_SEC": "seconds until a rank that does not answer is given up",
    "LOCAL_RANK": "number of this rank on its machine",
    "LOCAL_WORLD_SIZE": "ranks of a machine, which parts the all-to-all in two steps",
}
"""Tutel's variables of the environment that have their effect."""

SPEED = (
    "FAST_CUMSUM",
    "LOCAL_SIZE",
    "NUMA_TYPE",
    "OP_LOADER",
    "TUTEL_ALLTOALL_ALGO",
    "TUTEL_CUDA_SANDBOX",
)
"""Tutel's variables for its kernels, processes and messages: they change no value, and are not read."""

ENVIRONMENT = {
    "SKIP_MOE": "leave the layer out of the model",
    "SKIP_EXPERT": "measure phases with torch.profiler",
    "SKIP_A2A": "measure phases with torch.profiler",
}
"""Tutel's switches that would change what the layer computes, with the way out."""


refusing = partial(no_counterpart.refusing, refused=REFUSED)
"""`__getattr__` of the door's module that stands for a module of Tutel."""


def refuse_switches() -> None:
    """Raise ConfigError for a switch of Tutel's that is set in the environment and has no counterpart."""
    for name, way_out in ENVIRONMENT.items():
        if os.environ.get(name, "0") not in ("", "0"):
            raise ConfigError(
                f"{name}={os.environ[name]}: this switch of Tutel has no effect here; unset it, and {way_out}"
            )
