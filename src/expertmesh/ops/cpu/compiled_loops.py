"""Loops that torch.compile's C++ backend makes of a few lines of PyTorch, for the CPU.

Unlike `torch.compile` itself this has no guards: a loop is made once, for all sizes, and called at once (9 us). It takes
a C++ compiler on the machine and some seconds (fewer where torch's cache has the loop), so callers ask for one only where
much is to be computed, and have a slower way without. `expertmesh doctor` says whether there is a compiler that works;
TORCH_COMPILE_DISABLE=1 does without one.
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
"""Types of tensors for which there are loops; they compute in FP32."""

_log = logging.getLogger("expertmesh.ops")

_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # one instruction multiplies and adds
    "assert_indirect_indexing": False,  # per element; the callers have checked the indices
    "cpp.dynamic_threads": True,  # as many as torch has at the call
    "cpp_wrapper": True,  # other Python threads run meanwhile, as with torch's operators
    "compile_threads": 1,  # no pool of processes for one loop
}
_ONE_AT_A_TIME = threading.Lock()
"""Tracing changes what all of torch's modules do, until it has ended; so torch.compile has such a lock, taken too."""
_said: list[str] = []


@dataclass(frozen=True)
class Loop:
    """A compiled function, or why there is none.

    Attributes:
        run: takes contiguous tensors, or such columns of them as the example had; no index is checked.
        problem: one line.
    """

    run: Callable[..., Any] | None
    problem: str = ""

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it; for callers who have made sure that there is one."""
        assert self.run is not None, self.problem
        return self.run(*tensors)


def make_loop(
    function: Callable[..., Any],
    example: tuple[Tensor, ...],
    options: Mapping[str, Any] | None = None,
) -> Loop:
    """Compile a function of tensors, and compare what it makes of the example with the function itself.

    Args:
        function: returns tensors; may write into arguments that it does not read.
        example: small CPU tensors whose sizes differ where they may, none 0 or 1: what is equal here stays equal.
        options: the options of Inductor, beside ours.
    """
    _log.info("compiling %s for the CPU, which takes some seconds", function)
    try:
        with _ONE_AT_A_TIME, torch.no_grad(), torch.autocast("cpu", enabled=False):
            run = _compile(function, example, options)
            ours = (run(*example), *(t.clone() for t in example))
            plain = (function(*example), *example)
        torch.testing.assert_close(ours, plain)
    except Exception as error:  # a compiler has many ways to fail, and the caller another way to go
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if not _said:
            _said.append(problem)
            _log.warning("large experts go a slower way on this CPU: %s", problem)
        return Loop(None, problem)
    return Loop(run)


def compiler_problem() -> str:
    """Why torch.compile finds no C++ compiler, in one line; nothing where it finds one, or is switched off and needs none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own old parts
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
    """Normal numbers for an example, always the same; the caller's random state stays."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype)


@contextmanager
def while_tracing() -> Iterator[None]:
    """What traces goes on alone, and torch's modules know of it; modes of the caller, who may count operations, see nothing of it.

    Raises:
        RuntimeError: torch.compile is switched off.
    """
    with while_compiling():
        from torch._export.utils import _compiling_state_context

        with _compiling_state_context():
            yield


@contextmanager
def while_compiling() -> Iterator[None]:
    """What compiles goes on alone, as for `while_tracing`, but other threads compute as ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own old parts
        from torch._dynamo.config import disable
        from torch._dynamo.convert_frame import compile_lock

        import_module("torch._inductor.compile_fx")
        import_module("torch.utils.mkldnn")  # which it imports when it compiles
        from torch.utils._python_dispatch import _disable_current_modes

    if disable:
        raise RuntimeError("torch.compile is switched off (TORCH_COMPILE_DISABLE)")
    with compile_lock, _disable_current_modes():
        yield


def compile_graph(
    graph: Any, example: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph that was traced with symbolic sizes.

    Args:
        graph: a `torch.fx.GraphModule`.
        example: its arguments.
        options: the options of Inductor, beside ours.
    """
    with while_compiling():
        from torch._inductor import standalone_compile
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        # torch's cache knows a loop by its source, not by the instructions for which it was made: sixteen numbers at once, read
        # back where registers hold eight (a cache that machines share, ATEN_CPU_CAPABILITY), give wrong sums
        caches: Any = torch.compiler.config
        # compiled functions in other threads go on
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
