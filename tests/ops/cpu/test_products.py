"""FP32 products on the CPU by oneDNN instead of MKL: the same numbers to rounding, on any processor."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, sums_of_product
from tests.support.calls import calls_of

from expertmesh.ops.cpu import products as cpu_products


@pytest.fixture(params=["blas", "onednn"])
def library(request):
    with cpu_products.multiplying_by(request.param), calls_of(cpu_products._onednn) as calls:
        yield
    assert bool(calls) == (request.param == "onednn")


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("form", ["NN", "NT", "TN", "TN wide"])
@pytest.mark.parametrize("add", [False, True])
def test_products_of_all_layouts(library, form, add):
    M, K, N = (96, 130, 112) if form != "TN wide" else (112, 130, 96)
    a = randn(K, M).T if form.startswith("TN") else randn(M, K)
    b = randn(N, K).T if form == "NT" else randn(K, N)
    start = randn(M, N) if add else torch.full((M, N), torch.nan)
    out = start.clone()
    cpu_products.product_into(a, b, out, add=add)
    base = start if add else torch.zeros(M, N)
    exact = base.double() + a.double() @ b.double()
    sums = sums_of_product(a, b, plus=base)
    assert_two_times(out, base + a @ b, exact, what="product", sums=sums)


def test_product_with_bias(library):
    x, w, bias = randn(96, 130), randn(112, 130), randn(112)
    out = torch.full((96, 112), torch.nan)
    cpu_products.linear_into(x, w, out, bias_N=bias)
    exact = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    plain = torch.nn.functional.linear(x, w, bias)
    assert_two_times(out, plain, exact, what="product", sums=sums_of_product(x, w.T, plus=bias))


@pytest.mark.parametrize("shape", [(96,), (4, 24)])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_linear_and_its_gradients(library, shape, needs):
    x, w, grad = randn(*shape, 130), randn(112, 130), randn(*shape, 112)

    def run(function, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_(n) for t, n in zip((x, w), needs, strict=True)]
        y = function(*leaves)
        y.backward(grad.to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]

    plain, exact = (run(torch.nn.functional.linear, t) for t in (torch.float32, torch.float64))
    ours = run(cpu_products.linear, torch.float32)
    for name, *values in zip(("y", "first", "second"), ours, plain, exact, strict=False):
        assert_two_times(*values, what=name, dtype=torch.float32)
        assert values[0].is_contiguous()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_other_types_small_products_autocast_and_compilers_take_the_ordinary_way():
    x, w = randn(96, 130), randn(112, 130)
    with cpu_products.multiplying_by("onednn"), calls_of(cpu_products._onednn) as calls:
        cpu_products.linear(x.double(), w.double())
        cpu_products.linear(x.bfloat16(), w.bfloat16())
        cpu_products.linear(x[:2], w)
        with torch.autocast("cpu", torch.bfloat16):
            assert cpu_products.linear(x, w).dtype == torch.bfloat16
        with torch.backends.mkldnn.flags(enabled=False):
            cpu_products.linear(x, w)
        torch.compile(cpu_products.linear, backend="eager", fullgraph=True)(x, w)
        assert calls == []
        cpu_products.linear(x, w)
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
    ],
)
def test_mkl_holds_back_on_processors_of_others(vendor, capability, expected):
    assert cpu_products.runs_avx2_code(f"vendor_id\t: {vendor}\n", capability) == expected


@pytest.mark.parametrize(("is_coarse", "parts"), [(False, 32), (True, 8)])
def test_row_counts_of_bf16_products_are_few(is_coarse, parts):
    cpu = torch.device("cpu")
    rows = {n: cpu_products.gemm_rows(n, cpu, torch.bfloat16, is_coarse=is_coarse) for n in range(2048)}
    assert all(n <= m <= n + n // parts for n, m in rows.items())
    assert len({rows[n] for n in range(1024, 2048)}) <= parts + 1
    assert cpu_products.gemm_rows(1025, cpu, torch.float64, is_coarse=is_coarse) == 1025
    for library in ("blas", "onednn"):
        with cpu_products.multiplying_by(library):
            found = cpu_products.gemm_rows(1025, cpu, torch.float32, is_coarse=is_coarse)
        assert found == (rows[1025] if library == "onednn" else 1025)
