"""What the tests of the operators share."""

import pytest
import torch

from expertmesh.ops.cpu import compiled_products, products
from expertmesh.ops.cpu.compiled_products import loop_for
from expertmesh.ops.experts import few_rows, torch_backward, torch_forward


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

    def become(*, mkl_holds_back=None, has_bf16=None):
        if mkl_holds_back is not None:
            for module in (products, compiled_products):
                monkeypatch.setattr(module, "mkl_holds_back", lambda: mkl_holds_back)
        if has_bf16 is not None:
            for module in (few_rows, compiled_products):
                monkeypatch.setattr(module, "has_products_of", lambda dtype: has_bf16)

    return become
