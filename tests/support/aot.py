"""Compiling Triton kernels for GPUs that are not here, and what the assemblers say of the result."""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100/H200, B200 and MI300."""


@dataclass(frozen=True)
class Build:
    """One kernel compiled for one target.

    Attributes:
        target: a key of TARGETS.
        assembly: PTX, or AMD GCN assembly.
        stages: every intermediate text by name (ttir, ttgir, llir, ptx or amdgcn).
        metadata: Triton's: num_warps, num_stages, shared, name, ...
        log: what `ptxas -v` said; empty for AMD, where the assembly holds the numbers.
    """

    target: str
    assembly: str
    stages: Mapping[str, str]
    metadata: Any
    log: str

    @property
    def shared_bytes(self) -> int:
        """Shared memory (LDS) of a program."""
        return int(self.metadata.shared)

    @cached_property
    def spill_bytes(self) -> int:
        """Register spills per thread: bytes stored plus bytes loaded (AMD: 4 bytes per spilled vector register)."""
        if self.target.startswith("sm_"):
            return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log))
        return 4 * _amd_field(self.assembly, "vgpr_spill_count")

    @cached_property
    def registers(self) -> int:
        """Registers per thread (AMD: vector registers, accumulators included)."""
        if self.target.startswith("sm_"):
            return max(int(n) for n in re.findall(r"Used (\d+) registers", self.log))
        return _amd_field(self.assembly, "vgpr_count")


def _amd_field(assembly: str, name: str) -> int:
    found = re.findall(rf"\.{name}:\s*(\d+)", assembly)
    assert found, f"no .{name} in the assembly"
    return int(found[-1])


def build(
    kernel: Any,
    target: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    unaligned: frozenset[str] = frozenset(),
    **options: Any,
) -> Build:
    """Compile a kernel down to machine code; needs no GPU and no driver.

    Args:
        kernel: a `@triton.jit` function.
        target: a key of TARGETS.
        types: type of every argument that is not constant, as Triton writes it: "*bf16", "i32", "fp32",
            "tensordesc<bf16[128, 64]>", ...
        constants: values of the constexpr arguments, and of arguments that are None or 1.
        unaligned: arguments that are not multiples of 16 (16 bytes for pointers); all others that may be, are. This is
            what Triton finds out by itself at a launch; arguments of do_not_specialize are never taken as aligned.
        options: num_warps, num_stages, ...

    Returns:
        The build. Nothing is read from or kept in Triton's cache.

    Raises:
        AssertionError: types and constants do not name exactly the arguments of the kernel.
    """
    names = kernel.arg_names
    given = {*types, *constants}
    assert given == set(names), f"{kernel.__name__}: {given ^ set(names)} missing or unknown"
    signature = {name: types.get(name, "constexpr") for name in names}
    skipped = {p.name for p in kernel.params if p.do_not_specialize} | set(unaligned)
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in types and name not in skipped and _may_be_aligned(types[name])
    }
    source = ASTSource(kernel, signature, dict(constants), hints)
    log = io.StringIO()
    with _fresh_cache(), contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=TARGETS[target], options=options)
    stages = {k: v for k, v in compiled.asm.items() if isinstance(v, str)}
    assembly = stages["ptx" if "ptx" in stages else "amdgcn"]
    return Build(target, assembly, stages, compiled.metadata, log.getvalue())


def _may_be_aligned(type_name: str) -> bool:
    return type_name.startswith("*") or type_name in ("i32", "i64")


@contextlib.contextmanager
def _fresh_cache() -> Iterator[None]:
    # a cache hit would have no assembler log
    knobs = triton.knobs
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        yield
