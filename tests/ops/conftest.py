"""What the tests of the operators share."""

import pytest
import torch

from expertmesh.ops.cpu import compiled_products, products
from expertmesh.ops.cpu.compiled_products import loop_for
from expertmesh.ops.experts import few_rows, native, torch_backward, torch_forward
from expertmesh.ops.invariant import native_linear


@pytest.fixture
def cpp_compiler():
    """Skips where there is no C++ compiler; one that fails otherwise shall fail the tests."""
    if "InvalidCxxCompiler" in loop_for(torch.float32, 1).problem:
        pytest.skip("no C++ compiler")


@pytest.fixture
def products_in_the_type_of_the_input(monkeypatch):
    """As on processors that multiply BF16; on others products of BF16 rows are FP32's."""
    for module in (torch_forward, torch_backward):
        monkeypatch.setattr(module, "gemm_dtype", lambda device, dtype: dtype)


@pytest.fixture
def processor(monkeypatch):
    """A function that makes this processor another one."""

    def become(*, mkl_holds_back=None, has_bf16=None, loaded=None):
        own = {
            "mkl_holds_back": (mkl_holds_back, lambda: mkl_holds_back),
            "has_products_of": (has_bf16, lambda dtype: has_bf16),
            "loaded": (loaded, lambda: loaded),
        }
        for name, (value, answer) in own.items():
            for module in (products, compiled_products, few_rows, native, native_linear):
                if value is not None and hasattr(module, name):
                    monkeypatch.setattr(module, name, answer)

    return become
