"""What the tests of the operators share."""

from functools import cache

import pytest
import torch

from expertmesh.kernels.cpu import library
from expertmesh.kernels.cpu.build import built
from expertmesh.kernels.cpu.instructions import flags_of_processor, sets_of
from expertmesh.kernels.cpu.library import Kernels, Loaded
from expertmesh.ops import native_linear
from expertmesh.ops.attention import paged_native
from expertmesh.ops.cpu import products
from expertmesh.ops.cpu.compiled_loops import example_values, make_loop
from expertmesh.ops.experts import native, torch_backward, torch_forward

SETS = {one.name: one for one in sets_of(flags_of_processor())}


@pytest.fixture
def cpp_compiler():
    """Skips where there is no C++ compiler; one that fails otherwise shall fail the tests."""
    if "InvalidCxxCompiler" in make_loop(torch.neg, (example_values(3, 5),)).problem:
        pytest.skip("no C++ compiler")


@pytest.fixture
def products_in_the_type_of_the_input(monkeypatch):
    """As on processors that multiply BF16; on others products of BF16 rows are FP32's."""
    for module in (torch_forward, torch_backward):
        monkeypatch.setattr(module, "gemm_dtype", lambda device, dtype: dtype)


@pytest.fixture
def processor(monkeypatch):
    """A function that makes this processor another one."""

    def become(*, mkl_holds_back=None, loaded=None):
        own = {
            "mkl_holds_back": (mkl_holds_back, lambda: mkl_holds_back),
            "loaded": (loaded, lambda: loaded),
        }
        for name, (value, answer) in own.items():
            for module in (products, native, native_linear, paged_native):
                if value is not None and hasattr(module, name):
                    monkeypatch.setattr(module, name, answer)

    return become


@cache
def kernels_of(name):
    with built(SETS[name]) as path:
        return Kernels(path, SETS[name])


@pytest.fixture(params=SETS)
def instructions(request, processor):
    """Every instruction set that this processor has, for the kernels in C."""
    if library.loaded().kernels is None:
        pytest.skip("no C compiler")
    processor(loaded=Loaded(kernels_of(request.param)))
    return SETS[request.param]
