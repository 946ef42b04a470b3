"""What `moe_mlp` saves and the most it holds, against the formulas of docs/kernels.md."""

import functools

import pytest
import torch
from tests.support.experts_case import ExpertsCase
from tests.support.memory import peak_bytes, saved_bytes

from expertmesh import MoELayer
from expertmesh.functional import WeightGradients, moe_mlp
from expertmesh.ops.cpu.activation_passes import BLOCK_ELEMENTS
from expertmesh.ops.cpu.products import gemm_rows, goes_to_onednn
from expertmesh.ops.experts.torch_backward import RUN_ELEMENTS
from expertmesh.ops.experts.torch_forward import FEW_ELEMENTS

# T, D, F, E, K
SHAPES = [(1500, 64, 192, 4, 2), (2000, 128, 160, 16, 1), (700, 96, 64, 32, 8)]
G = 2
HUNDRED = 100


# The formulas are for processors that multiply BF16; others hold copies in FP32 besides.
pytestmark = pytest.mark.usefixtures("products_in_the_type_of_the_input")


def within_one_percent(found, expected):
    return abs(found - expected) * HUNDRED <= expected


def at_most(found, bound):
    """At most one percent over the formula, which leaves out what is small against rows, as bounds of experts."""
    return found * HUNDRED <= bound * (HUNDRED + 1)


def operands(case):
    x, w_in, w_out, weights, *_ = case.leaves()
    return x, w_in, w_out, weights


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes(shape, dtype, recompute_h):
    T, D, F, E, K = shape
    case = ExpertsCase.draw(shape, dtype=dtype)
    x, w_in, w_out, weights = operands(case)
    options = {"activation": "swiglu", "recompute_h": recompute_h}
    found = saved_bytes(
        lambda: moe_mlp(x, w_in, w_out, weights, case.metadata, **options),
        parameters=(w_in, w_out),
    )
    elements = T * D + (0 if recompute_h else G * T * K * F)
    metadata_and_weights = 4 * (E + 1 + 3 * T * K) + 4 * T * K
    assert within_one_percent(found, elements * dtype.itemsize + metadata_and_weights)


def padded_rows(case, dtype):
    """Rows of every expert, and the same with their padding."""
    counts = case.metadata.offsets_E.diff().tolist()
    # all shapes are narrow ones (`Experts.are_narrow`)
    return counts, [gemm_rows(n, torch.device("cpu"), dtype, is_coarse=True) for n in counts]


def rows_of_largest(case, dtype):
    """Rows of the largest expert with their padding, and the padding."""
    counts, padded = padded_rows(case, dtype)
    return max(padded), max(m - n for m, n in zip(padded, counts, strict=True))


def scratch_bytes(rows, hidden_dim, dtype, *, backward):
    narrow = dtype != torch.float32
    buffers = (6 if narrow else 2) if backward else (2 if narrow else 0)
    return buffers * 4 * min(rows * hidden_dim, BLOCK_ELEMENTS * torch.get_num_threads())


@functools.cache
def library_bytes(rows, D, F):
    """The most that oneDNN itself holds during one expert's BF16 products.

    Measured, because it depends on the instructions and on the threads: copies of factors in the order of its tiles,
    sums in FP32, both for each thread where there are several.
    """
    h, x = torch.ones(rows, G * F, dtype=torch.bfloat16), torch.ones(rows, D, dtype=torch.bfloat16)
    w_in, w_out = torch.ones(G * F, D, dtype=h.dtype), torch.ones(D, F, dtype=h.dtype)
    products = ((x, w_in.T), (h[:, :F], w_out.T), (h, w_in), (x, w_out), (h.T, x), (x.T, h[:, :F]))
    outs = [torch.empty(len(a), b.shape[1], dtype=h.dtype) for a, b in products]
    return max(
        peak_bytes(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        for (a, b), out in zip(products, outs, strict=True)
    )


def product_bytes(rows, shape, dtype):
    """One expert's product before it is copied to its place, and a copy of one factor, where oneDNN multiplies FP32."""
    _, D, F, _, _ = shape
    if dtype == torch.bfloat16:
        return library_bytes(rows, D, F)
    if not goes_to_onednn(dtype, torch.device("cpu")):
        return 0
    return 4 * (G * F * max(rows, D) + rows * max(D, F))


def small_bytes(shape):
    """Routing weights of the rows, their gradients, the maps of the padding and of the sum per token."""
    T, _, _, _, K = shape
    return T * (32 * K + 24)


def forward_bound(case, shape, dtype, *, save_h):
    T, D, F, _, K = shape
    largest, padding = rows_of_largest(case, dtype)
    block = max(largest, min(T * K, FEW_ELEMENTS // (G * F))) + padding
    elements = T * D + (T * K + padding) * D + block * (D + G * F + F)
    elements += G * T * K * F if save_h else 0
    scratch = scratch_bytes(block, F, dtype, backward=False) + product_bytes(largest, shape, dtype)
    return elements * dtype.itemsize + scratch + small_bytes(shape)


def backward_bound(case, shape, dtype, *, recompute_h, weights_bytes):
    T, D, F, _, K = shape
    largest, padding = rows_of_largest(case, dtype)
    _, padded = padded_rows(case, dtype)
    block = max(largest, min(sum(padded), RUN_ELEMENTS // (G * F)))
    elements = T * D + (T * K + padding) * D + block * (D + 2 * F + G * F)
    elements += block * G * F if recompute_h else 0
    scratch = scratch_bytes(block, F, dtype, backward=True) + product_bytes(largest, shape, dtype)
    return elements * dtype.itemsize + scratch + small_bytes(shape) + weights_bytes


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_peaks(shape, dtype, recompute_h):
    case = ExpertsCase.draw(shape, dtype=dtype)
    x, w_in, w_out, weights = operands(case)
    options = {"activation": "swiglu", "recompute_h": recompute_h}

    def forward():
        return moe_mlp(x, w_in, w_out, weights, case.metadata, **options)

    assert at_most(peak_bytes(forward), forward_bound(case, shape, dtype, save_h=not recompute_h))
    y = forward()
    leaves = (x, w_in, w_out, weights)
    found = peak_bytes(lambda: torch.autograd.grad(y, leaves, case.grad_TD))
    gradients = (w_in.numel() + w_out.numel()) * dtype.itemsize
    bound = backward_bound(case, shape, dtype, recompute_h=recompute_h, weights_bytes=gradients)
    assert at_most(found, bound)
    assert found > bound / 2  # the formula is no idle promise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_gradients_need_no_temporary_of_the_weights_size(dtype):
    shape = (96, 64, 96, 32, 2)
    T, D, F, E, K = shape
    case = ExpertsCase.draw(shape, dtype=dtype)
    x, w_in, w_out, weights = operands(case)
    buffers = WeightGradients(*(torch.zeros(w.shape, dtype=torch.float32) for w in (w_in, w_out)))
    y = moe_mlp(x, w_in, w_out, weights, case.metadata, activation="swiglu", main_grads=buffers)
    found = peak_bytes(lambda: y.backward(case.grad_TD))
    # BF16 products are rounded, widened, then added: one expert's at a time
    temporary = 0 if dtype == torch.float32 else G * F * D * (dtype.itemsize + 4)
    bound = backward_bound(case, shape, dtype, recompute_h=False, weights_bytes=temporary)
    assert at_most(found, bound)
    assert bound < (w_in.numel() + w_out.numel()) * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_of_a_layer_in_training(shape, dtype):
    """The experts' peak, what the router saved until then, and nothing else."""
    T, D, F, E, K = shape
    layer = MoELayer(dim=D, hidden_dim=F, num_experts=E, top_k=K, seed=0, dtype=dtype)
    x = torch.randn(T, D).to(dtype).requires_grad_()
    found = peak_bytes(lambda: layer(x))
    ids = layer(x)[1].topk_expert_ids_TK
    case = ExpertsCase.draw(shape, dtype=dtype)
    counts = ids.flatten().bincount(minlength=E)
    case.metadata.offsets_E[1:] = counts.cumsum(0)
    routing = T * (3 * 4 * E + 64 * K + 24)
    assert at_most(found, forward_bound(case, shape, dtype, save_h=True) + routing)
