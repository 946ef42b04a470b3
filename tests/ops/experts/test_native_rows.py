"""A row's bits by the kernels in C: alone and in batches of 1 to 700, for every format, with adapters, on one and two
threads, without trials."""

import pytest
import torch
from tests.ops.experts.test_native import make_call, quantized_call, two_threads  # noqa: F401
from tests.oracle.numerics import assert_two_times
from tests.support.adapters import of_runs
from tests.support.poison import poisoned_empty

from expertmesh.ops.experts.call import LowRank
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS

pytestmark = pytest.mark.usefixtures("instructions", "no_trials")
BF16, FP32 = torch.bfloat16, torch.float32
MANY = 700
SIZES = (1, 2, 5, 16, 17, 33, 100, 511)
FORMATS = {"dense": 0, "int8": 0, "int4": 16}
CASES = [
    (format, dtype, shape)
    for format, group in FORMATS.items()
    for dtype in (BF16, FP32)
    for shape in ((33, 47, 7, 7), (31, 65, 1, 1), (64, 96, 7, 2))
    if not (group and shape[0] % group)
]
"""Format, type of rows, and D, F, E, K: odd ones, and K = E."""


@pytest.fixture
def no_trials():
    """No number of rows that gives equal results has to be found by trial of PyTorch's products."""
    verdicts = (invariant._rows_of, invariant._batched_rows_of)
    before = [one.cache_info() for one in verdicts]
    yield
    assert [one.cache_info() for one in verdicts] == before


def case_of(format, dtype, shape, *, num_rows=MANY):
    """Call without rows of the last expert of several, and with masked rows that hold NaN."""
    D, F, E, K = shape
    if format == "dense":
        call = make_call((num_rows, D, F, E, K), dtype=dtype, bias=True)
    else:
        given = {"shape": (num_rows, D, F, E, K), "dtype": dtype, "scale_dtype": dtype}
        call, _ = quantized_call(format, group_size=FORMATS[format], **given)
    ids_TK, x_TD = call.ids_TK.clone(), call.x_TD.clone()
    if E > 1:
        ids_TK[ids_TK == E - 1] = E
    ids_TK[3::11], x_TD[3::11] = E, torch.nan
    weights_TK = call.weights_TK.masked_fill(ids_TK == E, torch.nan)
    return call._replace(x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK)


def low_rank(call, *, on_in, seed):
    E, (D, F) = call.experts.num_experts, (call.x_TD.shape[1], call.experts.w_in[0].shape[2])
    rows, columns = (2 * F, D) if on_in else (D, F)
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(E, *s, generator=generator) for s in ((3, columns), (rows, 3)))
    return LowRank(a.to(call.x_TD.dtype), (0.1 * b).to(call.x_TD.dtype), 1.0, False)


def with_adapters(call):
    """Rows with an adapter of both matrices, without one, and with one of w_out."""
    T = len(call.x_TD)
    one, two = adapters_of(call)
    return call._replace(of_tokens=of_runs(T, [(0, T // 2, *one), (T // 2 + 9, T, *two)]))


def adapters_of(call):
    one = (low_rank(call, on_in=True, seed=1), low_rank(call, on_in=False, seed=2))
    return one, (None, low_rank(call, on_in=False, seed=3))


def part_of(call, start, stop):
    own = call.of_tokens
    if own is not None:
        slots = own.slot_T[start:stop].tolist()
        own = type(own).of_slots(slots, torch.device("cpu"))._replace(on_in=own.on_in, on_out=own.on_out)
    return call._replace(
        x_TD=call.x_TD[start:stop],
        ids_TK=call.ids_TK[start:stop],
        weights_TK=call.weights_TK[start:stop],
        of_tokens=own,
    )


def computed(call):
    with torch.no_grad(), poisoned_empty():
        return compute(call)


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(("format", "dtype", "shape"), CASES)
def test_a_row_has_the_same_bits_in_every_batch(
    format,
    dtype,
    shape,
    is_adapted,
    request,
    two_threads,  # noqa: F811
):
    call = case_of(format, dtype, shape)
    call = with_adapters(call) if is_adapted else call
    whole = computed(call)
    assert not whole[3::11].any() and whole.isfinite().all()
    torch.set_num_threads(1)
    assert torch.equal(computed(call), whole)
    for at, size in enumerate(SIZES):
        for start in (7 * at, (MANY - size) // 2, MANY - size):
            found = computed(part_of(call, start, start + size))
            assert torch.equal(found, whole[start : start + size]), (size, start)
    assert computed(part_of(call, 0, 0)).shape == (0, shape[0])


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(("format", "dtype", "shape"), CASES)
def test_rows_that_want_gradients_have_the_bits_of_others(format, dtype, shape, is_adapted):
    """The forward of a batch-invariant model is one, whether a backward follows or not; adapters of requests give
    none."""
    call = case_of(format, dtype, shape, num_rows=40)
    expected = computed(call)
    x_TD = call.x_TD.clone().requires_grad_()
    assert torch.equal(compute(call._replace(x_TD=x_TD)).detach(), expected)
    if is_adapted:
        found = computed(with_adapters(call))
        bare = slice(20, 29)
        assert torch.equal(found[bare], expected[bare]) and not torch.equal(found, expected)


@pytest.mark.parametrize(("format", "dtype", "shape"), CASES)
def test_adapted_rows_are_as_exact_as_pytorch(format, dtype, shape):
    call = with_adapters(case_of(format, dtype, shape, num_rows=40))
    E, live = call.experts.num_experts, torch.ones(40, dtype=torch.bool)
    live[3::11] = False
    wide_experts = call.experts.joined(torch.float64)

    def merged(kind, own):
        """Experts with an adapter in their matrices, in a type."""
        matrices = [wide_experts.w_in_EGFD, wide_experts.w_out_EDF]
        for i, adapter in enumerate(own):
            if adapter is not None:
                added = adapter.b_ENr.double() @ adapter.a_ErK.double()
                matrices[i] = matrices[i] + added.view(matrices[i].shape)
        biases = [b.to(kind) for b in (wide_experts.b_in_EGF, wide_experts.b_out_ED)]
        names = dict(zip(("b_in", "b_out"), biases, strict=True))
        return ExpertWeights.of(*(w.to(kind) for w in matrices), "swiglu", **names)

    def plain(kind):
        parts = []
        first, last = adapters_of(call)
        for own, start, stop in ((first, 0, 20), ((), 20, 29), (last, 29, 40)):
            one = part_of(call._replace(of_tokens=None), start, stop)
            x_TD = torch.where((one.ids_TK < E).any(1, keepdim=True), one.x_TD, 0).to(kind)
            weights_TK = one.weights_TK.nan_to_num().to(torch.promote_types(kind, FP32))
            one = one._replace(x_TD=x_TD, weights_TK=weights_TK, experts=merged(kind, own))
            parts.append(compute(one._replace(backend="reference", batch_invariant=False)))
        return torch.cat(parts).detach()

    assert_two_times(computed(call), plain(dtype), plain(torch.float64), what="y", dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(33, 47), (64, 96)])
def test_dense_products_with_an_adapter(dtype, shape, two_threads):  # noqa: F811
    """As requests have them on linear maps: three products, each with one order of sums."""
    generator = torch.Generator().manual_seed(0)
    N, K = shape
    x, w, a, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((MANY, K), (N, K), (3, K), (N, 3)))
    linear = BATCH_INVARIANT_OPS.linear

    def adapted(rows):
        return linear(rows, w) + linear(linear(rows, a), b)

    x[5] = torch.nan
    whole = adapted(x)
    torch.set_num_threads(1)
    others = torch.arange(MANY) != 5
    for size in (*SIZES, MANY):
        for start in (0, MANY - size):
            found, rows = adapted(x[start : start + size]), others[start : start + size]
            assert torch.equal(found[rows], whole[start : start + size][rows])
    assert linear(x[:0], w).shape == (0, N)
