"""Instruction sets that the kernels are written for, and which of them this processor has."""

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from expertmesh.errors import ConfigError

VARIABLE = "EXPERTMESH_CPU_ISA"
"""Environment variable that names a lower instruction set than the processor's best."""

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_BF16 = (*_AVX512, "-mavx512bf16")


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set."""

    name: str  # its name in `INSTRUCTION_SETS`
    flags: frozenset[str]  # what Linux calls the instructions in /proc/cpuinfo
    options: tuple[str, ...]  # options of the compiler
    has_bf16: bool = False  # whether it multiplies BF16
    has_tiles: bool = False  # whether it has tiles, which the system has to grant


INSTRUCTION_SETS: dict[str, InstructionSet] = {
    name: InstructionSet(name, frozenset(flags.split()), options, "bf16" in flags, name == "amx")
    for name, flags, options in (
        (
            "amx",
            "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
            (*_BF16, "-mamx-tile", "-mamx-bf16"),
        ),
        ("avx512_bf16", "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16", _BF16),
        ("avx512", "avx2 fma avx512f avx512bw avx512vl avx512dq", _AVX512),
        ("avx2", "avx2 fma", _AVX2),
        ("plain", "", ()),
    )
}
"""Instruction sets, the best first. "plain" is what the compiler takes without options."""
TORCH = "torch"
"""Name of PyTorch's own products, where there are no kernels."""
NAMES = (*INSTRUCTION_SETS, TORCH)
"""Names of ways to compute on a CPU, the best first; each has an order of sums of its own, so other bits."""


@cache
def flags_of_processor() -> frozenset[str]:
    """Instructions of this processor as Linux names them; none where /proc/cpuinfo does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((words.split() for key, _, words in lines if key.strip() == "flags"), ()))


def sets_of(flags: Iterable[str]) -> list[InstructionSet]:
    """Instruction sets of a processor with these flags, the best first."""
    have = frozenset(flags)
    return [one for one in INSTRUCTION_SETS.values() if one.flags <= have]


def allowed_sets() -> list[InstructionSet]:
    """Instruction sets of this processor, the best first, from the one on that the environment names."""
    found = sets_of(flags_of_processor())
    wanted = os.environ.get(VARIABLE, "")
    names = [one.name for one in found]
    if wanted and wanted not in names:
        raise ConfigError(
            f"{VARIABLE}={wanted!r}: is no instruction set of this processor, which has {', '.join(names)}; name one "
            "of these"
        )
    return found[names.index(wanted) :] if wanted else found
