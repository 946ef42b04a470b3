"""Few rows times the weights of many experts on a CPU, as fast as memory gives the weights.

A BLAS library packs a weight before it multiplies it, which pays from some ten rows on; with fewer, reading the weight is
all there is to do, and packing takes as long again. torch.compile's C++ backend makes a loop of three lines of PyTorch
that reads a weight once for up to four rows (docs/log.md has its times).

What it costs is a C++ compiler on the machine and a few seconds at the first call (fewer when torch's cache has it), so
it is for weights that no cache of the processor holds. Without it the callers have a slower way, and `expertmesh doctor`
says so.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

ROWS = 4
"""Of a block: their sums stay in registers, and the loop is still as fast as reading."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST = 1 << 24
"""Elements of all weights from which a loop is made: 32 MiB in BF16."""

_log = logging.getLogger("expertmesh.ops")

_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # one instruction multiplies and adds
    "assert_indirect_indexing": False,  # per element; the callers have checked the ids
    "cpp.dynamic_threads": True,  # as many as torch has at the call
    "compile_threads": 1,  # no pool of processes for one loop
}
_FAILURES = (RuntimeError, OSError, ImportError, AttributeError, TypeError, AssertionError)
"""Of a compiler that is missing or broken, a cache that cannot be written, another version of PyTorch."""


@dataclass(frozen=True)
class Loop:
    """The compiled function for one type of weights, or why there is none.

    Attributes:
        run: x (R, K) FP32, w (E, N, K), experts (B,) and rows (B, 4) -> (B, 4, N) FP32; no size may be 1.
        problem: one line.
    """

    run: Callable[..., Tensor] | None
    problem: str = ""


def serves(*weights: Tensor) -> bool:
    """Whether `product` may be called with these (E, N, K); the first large ones of a type have its loop made."""
    if sum(w.numel() for w in weights) < SMALLEST:
        return False
    return all(
        w.dtype in DTYPES
        and min(w.shape) > 1
        and w.is_contiguous()
        and _announced(w.dtype).run is not None
        for w in weights
    )


@cache
def _announced(dtype: torch.dtype) -> Loop:
    """`loop_for`, with a word in the log about what it takes or lacks."""
    _log.info("compiling a loop for products of few rows by weights in %s", dtype)
    loop = loop_for(dtype)
    if loop.run is None:
        _log.warning(
            "products of few rows by large weights go a slower way on this CPU: %s", loop.problem
        )
    return loop


def product(x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_B4: Tensor) -> Tensor:
    """Multiply blocks of rows by their experts' weights, transposed; with FP32 sums, and not seen by autograd.

    A row's sums are made in the same order whatever else is in the call.

    Args:
        x_RK: (R, K) FP32, contiguous, R at least 2.
        w_ENK: (E, N, K) for which `serves` holds.
        experts_B: (B,) int32 in [0, E), not checked; B at least 2.
        rows_B4: (B, 4) int32 in [0, R), not checked: which rows of x; a block of fewer names one of them again.

    Returns:
        (B, 4, N) FP32.
    """
    run = loop_for(w_ENK.dtype).run
    assert run is not None, "callers ask `serves`"
    return run(x_RK, w_ENK, experts_B, rows_B4)


@cache
def loop_for(dtype: torch.dtype) -> Loop:
    """Make the loop for weights of this type and try it on small ones."""
    # all sizes differ and none is 0 or 1, so that nothing is fixed but the 4; the caller's random numbers stay
    generator = torch.Generator().manual_seed(0)
    x_RK = torch.randn(7, 48, generator=generator)
    w_ENK = torch.randn(5, 40, 48, generator=generator).to(dtype)
    experts_B, rows_B4 = torch.tensor([4, 0, 1]).int(), torch.arange(12).view(3, ROWS).int() % 7
    call = (x_RK, w_ENK, experts_B, rows_B4)
    try:
        run = _compile(call)
        found = run(*call)
    except _FAILURES as error:
        return Loop(None, str(error).strip().partition("\n")[0] or type(error).__name__)
    exact = torch.einsum(
        "bik,bnk->bin", x_RK[rows_B4.long()].double(), w_ENK[experts_B.long()].double()
    )
    if not torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4):
        return Loop(None, "what the C++ compiler made gives wrong results")
    return Loop(run)


def _compile(example: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Compile for all sizes, without the checks of arguments by which torch.compile would choose and compile again."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own old parts
        from torch._inductor import standalone_compile
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(_blocks_times_weights, tracing_mode="symbolic")(*example)
        return standalone_compile(
            graph,
            list(example),
            dynamic_shapes="from_graph",
            options={"config_patches": _OPTIONS},
        )


def _blocks_times_weights(
    x_RK: Tensor, w_ENK: Tensor, experts_B: Tensor, rows_B4: Tensor
) -> Tensor:
    w_BNK = w_ENK[experts_B].to(x_RK.dtype)
    return torch.stack([(w_BNK * x_RK[rows_B4[:, i]][:, None]).sum(-1) for i in range(ROWS)], dim=1)
