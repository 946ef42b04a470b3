"""The interpreter as we call it: right on BF16, and without a trace in triton.language afterwards."""

import torch
import triton
import triton.language as tl

from expertmesh.kernels.interpret import interpret


@triton.jit
def _double_up(x, TIMES: tl.constexpr):
    for _ in range(TIMES):
        x = x + x
    return x


@triton.jit
def _product(x_ptr, y_ptr, wide_ptr, narrow_ptr, count, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    index = i[:, None] * SIZE + i[None, :]
    z = tl.dot(tl.load(x_ptr + index), tl.load(y_ptr + index))
    for _ in range(count):
        z = _double_up(z, 2)
    tl.store(wide_ptr + index, z)
    tl.store(narrow_ptr + index, z.to(narrow_ptr.dtype.element_ty))


def test_products_of_bf16_and_rounding_to_it():
    x, y = (torch.randint(-8, 9, (32, 32)).to(torch.bfloat16) for _ in range(2))
    wide, narrow = torch.empty(32, 32), torch.empty(32, 32, dtype=torch.bfloat16)
    interpret(_product, (1,), (x, y, wide, narrow, 1), {"SIZE": 32, "num_warps": 4})
    assert torch.equal(wide, 4 * (x.float() @ y.float()))  # small whole numbers: exact
    assert torch.equal(narrow, wide.to(torch.bfloat16))


@triton.jit
def _round(x_ptr, y_ptr, back_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    y = tl.load(x_ptr + i).to(tl.bfloat16)
    tl.store(y_ptr + i, y)
    tl.store(back_ptr + i, y.to(tl.float32))


def test_bf16_conversions_are_those_of_torch():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-40, 0.0, -0.0])
    x = torch.cat([torch.randn(1017) * 10 ** (10 * torch.randn(1017)), special])
    y, back = torch.empty(1024, dtype=torch.bfloat16), torch.empty(1024)
    interpret(_round, (1,), (x, y, back), {"SIZE": 1024})
    assert torch.equal(y.nan_to_num(7.0), x.to(torch.bfloat16).nan_to_num(7.0))
    assert bool(y[1017].isnan())
    assert torch.equal(back.nan_to_num(7.0), y.float().nan_to_num(7.0))


def test_the_language_is_as_before():
    names = ("load", "store", "dot", "range", "reduce", "sum", "sort", "histogram")
    before = [getattr(module, name, None) for module in (tl, tl.core) for name in names]
    x = torch.randn(1024)
    interpret(_round, (1,), (x, x.to(torch.bfloat16), x.clone()), {"SIZE": 1024})
    after = [getattr(module, name, None) for module in (tl, tl.core) for name in names]
    assert all(a is b for a, b in zip(before, after, strict=True))
