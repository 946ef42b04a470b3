"""What the tests of the operators share."""

import pytest
import torch

from expertmesh.ops.cpu.compiled_products import loop_for


@pytest.fixture
def cpp_compiler():
    """Skips where there is no C++ compiler; one that fails otherwise shall fail the tests."""
    if "InvalidCxxCompiler" in loop_for(torch.float32, 1).problem:
        pytest.skip("no C++ compiler")
