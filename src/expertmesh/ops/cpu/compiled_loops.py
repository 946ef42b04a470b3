"""CPU loops that Inductor's C++ backend compiles from a few lines of PyTorch.

Unlike `torch.compile` this has no guards: a loop is compiled once for all sizes, and a call costs 9 us. Compiling needs
a C++ compiler and some seconds (fewer if torch's cache has the loop). Callers therefore ask for a loop only for large
computations, and have a slower fallback. `expertmesh doctor` says whether a compiler works; TORCH_COMPILE_DISABLE=1
disables the loops.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of tensors for which there are loops; they compute in FP32."""

_log = logging.getLogger("expertmesh.ops")

_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
    "assert_indirect_indexing": False,  # a check per element; callers have checked the indices
    "cpp.dynamic_threads": True,  # as many threads as torch has at the call
    "cpp_wrapper": True,  # releases the GIL, as torch's operators do
    "compile_threads": 1,  # no process pool for one loop
}
_ONE_AT_A_TIME = threading.Lock()
"""Lock for tracing, which changes the behaviour of torch's modules until it ends; torch.compile has such a lock, taken
too."""
_said: list[str] = []


@dataclass(frozen=True)
class Loop:
    """A compiled function, or the reason why there is none."""

    # the function; takes contiguous tensors, or column slices as in the example. Indices are not checked.
    run: Callable[..., Any] | None
    problem: str = ""  # the reason, one line

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the loop; callers must have checked that `run` is not None."""
        assert self.run is not None, self.problem
        return self.run(*tensors)


def make_loop(
    function: Callable[..., Any],  # returns tensors; may write into arguments that it does not read
    example: tuple[Tensor, ...],  # small CPU tensors without sizes 0 and 1. Equal sizes are compiled as always equal.
    options: Mapping[str, Any] | None = None,  # further options of Inductor
) -> Loop:
    """Compile a function of tensors, and check its results on the example against the function itself."""
    _log.info("compiling %s for the CPU, which takes some seconds", function)
    try:
        with _ONE_AT_A_TIME, torch.no_grad(), torch.autocast("cpu", enabled=False):
            run = _compile(function, example, options)
            ours = (run(*example), *(t.clone() for t in example))
            plain = (function(*example), *example)
        torch.testing.assert_close(ours, plain)
    except Exception as error:  # a compiler can fail in many ways, and the caller has a fallback
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if not _said:
            _said.append(problem)
            _log.warning("large experts go a slower way on this CPU: %s", problem)
        return Loop(None, problem)
    return Loop(run)


NO_COMPILER = "No working C++ compiler"
"""First words of torch's error where it finds none."""


def compiler_problem() -> str:
    """Reason why torch.compile finds no C++ compiler, in one line; "" if it finds one or is disabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's own old parts
        from torch._dynamo.config import disable
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    if disable:
        return ""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).strip().partition("\n")[0].removesuffix(".")
    return ""


def example_values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers for an example, always the same; the global generator is not changed."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype)


@contextmanager
def while_tracing() -> Iterator[None]:
    """Context for tracing: holds torch's compile lock, sets its compiling state, and hides the work from the caller's
    dispatch modes."""
    with _compile_lock():
        from torch._export.utils import _compiling_state_context

        with _compiling_state_context():
            yield


@contextmanager
def while_compiling() -> Iterator[None]:
    """Context for compiling: as `while_tracing`, without the compiling state; Inductor is imported, which takes a
    second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's own old parts
        import_module("torch._inductor.compile_fx")
        import_module("torch.utils.mkldnn")  # imported by Inductor when it compiles
    with _compile_lock():
        yield


@contextmanager
def _compile_lock() -> Iterator[None]:
    """Context that holds torch's compile lock and hides the work from dispatch modes; other threads compute as
    usual."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's own old parts
        from torch._dynamo.config import disable
        from torch._dynamo.convert_frame import compile_lock
        from torch.utils._python_dispatch import _disable_current_modes

    if disable:
        raise RuntimeError("torch.compile is switched off (TORCH_COMPILE_DISABLE)")
    with compile_lock, _disable_current_modes():
        yield


def compile_graph(graph: Any, example: Sequence[Any], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a graph traced with symbolic sizes. `graph`: a `torch.fx.GraphModule`."""
    with while_compiling():
        from torch._inductor import standalone_compile
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        # torch's cache finds a loop by its source, not by its instruction set: code for 16 lanes, run where registers
        # hold 8 (a cache shared by machines, ATEN_CPU_CAPABILITY), gives wrong sums
        caches: Any = torch.compiler.config
        # patched, because compiled functions in other threads go on
        with caches.patch(cache_key_tag=f"{caches.cache_key_tag} {pick_vec_isa()}"):
            run: Callable[..., Any] = standalone_compile(
                graph,
                list(example),
                dynamic_shapes="from_graph",
                options={"config_patches": {**_OPTIONS, **(options or {})}},
            )
            return run


def _compile(
    function: Callable[..., Any], example: tuple[Tensor, ...], options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    with warnings.catch_warnings(), while_tracing():
        warnings.simplefilter("ignore")
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(function, tracing_mode="symbolic")(*example)
        return compile_graph(graph, example, options)
