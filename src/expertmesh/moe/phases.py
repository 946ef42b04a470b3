"""Profiler ranges of the layer's phases: route, dispatch, experts, combine."""

from contextlib import AbstractContextManager, nullcontext

import torch

PHASES = ("route", "dispatch", "experts", "combine")
"""Phases of `MoELayer.forward`, in order; a profile shows them as `expertmesh::moe::NAME`."""


def phase(name: str) -> AbstractContextManager[object]:
    """Range of `torch.profiler` around one phase while a profiler runs; otherwise a null context.

    Entering a range costs tens of microseconds of Python, as much as a decoding step's router, so none is entered
    without a profiler. Compiled graphs have no ranges: their kernels carry the names of the operators.
    """
    # is_compiling first, so that the tracer does not reach the question whether a profiler runs
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"expertmesh::moe::{name}")
