"""Weighted sums and capacity buffers: backends agree with loops and with one another, gradients included."""

import pytest
import torch

from expertmesh.errors import ConfigError
from expertmesh.functional import (
    combine,
    combine_capacity,
    dispatch_capacity,
    route_metadata,
    unpermute,
    weighted_combine,
)
from expertmesh.testing.numerics import assert_close_fp64, assert_two_times, sums_of_terms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "torch"]


def inputs(num_tokens=12, top_k=3, num_experts=5, dim=6, *, dtype=torch.float64):
    ids = torch.randint(0, num_experts + 1, (num_tokens, top_k), device=DEVICE)
    metadata = route_metadata(ids, num_experts)
    x = torch.randn(num_tokens, dim, device=DEVICE, dtype=dtype)
    weights = torch.rand(num_tokens, top_k, device=DEVICE, dtype=dtype)
    return ids, metadata, x, weights


def looped(ids, x, weights, capacity, num_experts):
    """Buffers, and the sum over them with weights, one slot after another."""
    buffers = x.new_zeros(num_experts, capacity, x.shape[1])
    total, used = torch.zeros_like(x), [0] * num_experts
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            if e < num_experts and used[e] < capacity:
                buffers[e, used[e]] = x[t]
                used[e] += 1
                total[t] += weights[t, j] * x[t]
    return buffers, total


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("capacity", [1, 4, 40])
def test_buffers_and_their_sum(backend, capacity):
    ids, metadata, x, weights = inputs()
    buffers, total = looped(ids, x, weights, capacity, 5)
    ours = dispatch_capacity(x, metadata, capacity, backend=backend)
    assert torch.equal(ours, buffers)
    y = combine_capacity(ours, metadata, 3, weights_TK=weights, backend=backend)
    assert_close_fp64(y, total, what="sum")
    plain = combine_capacity(ours, metadata, 3, backend=backend)
    ones = looped(ids, x, torch.ones_like(weights), capacity, 5)[1]
    assert_close_fp64(plain, ones, what="plain sum")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend):
    _, metadata, x, weights = inputs(5, 2, 3, 3)
    x.requires_grad_()
    weights.requires_grad_()
    y = torch.randn(3, 2, 3, device=DEVICE, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(10, 3, device=DEVICE, dtype=torch.float64, requires_grad=True)

    def check(fn, values):
        torch.autograd.gradcheck(fn, values, fast_mode=backend == "triton")

    check(lambda v: dispatch_capacity(v, metadata, 2, backend=backend), (x,))
    check(
        lambda v, w: combine_capacity(v, metadata, 2, weights_TK=w, backend=backend), (y, weights)
    )
    check(lambda v: combine_capacity(v, metadata, 2, backend=backend), (y,))
    check(lambda v, w: weighted_combine(v, metadata, w, backend=backend), (rows, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_combine(dtype):
    _, metadata, _, weights = inputs(dtype=torch.float32)
    live = int(metadata.offsets_E[-1])
    rows = torch.randn(36, 6, device=DEVICE).to(dtype)
    rows[live:] = torch.nan
    results = [weighted_combine(rows, metadata, weights, backend=name) for name in BACKENDS]
    slots = unpermute(rows, metadata, 3)
    terms = slots.double() * weights.double()[..., None]
    plain = (slots.float() * weights[..., None]).sum(1).to(dtype)
    for y in results:
        assert_two_times(y, plain, terms.sum(1), what="y", sums=sums_of_terms(terms, 1))
    ones = weighted_combine(rows, metadata, torch.ones_like(weights), backend="triton")
    assert torch.equal(ones, combine(rows, metadata, 3, backend="triton"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_experts_used(backend):
    ids = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    metadata = route_metadata(ids, 3)
    x = torch.randn(0, 4, device=DEVICE, requires_grad=True)
    buffers = dispatch_capacity(x, metadata, 2, backend=backend)
    assert torch.equal(buffers, torch.zeros(3, 2, 4, device=DEVICE))
    y = combine_capacity(buffers, metadata, 2, backend=backend)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 4)
    dead = route_metadata(torch.full((3, 2), 3, device=DEVICE), 3)
    buffers = dispatch_capacity(torch.randn(3, 4, device=DEVICE), dead, 2, backend=backend)
    assert torch.equal(buffers, torch.zeros(3, 2, 4, device=DEVICE))


def test_second_derivative_of_triton_is_an_error():
    _, metadata, _, weights = inputs()
    rows = torch.randn(36, 6, device=DEVICE, dtype=torch.float64, requires_grad=True)
    y = weighted_combine(rows, metadata, weights, backend="triton")
    (grad,) = torch.autograd.grad(y.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_compile_without_breaks():
    ids, _, x, weights = inputs()

    def layer(x, ids, weights):
        metadata = route_metadata(ids, 5, backend="triton")
        buffers = dispatch_capacity(x, metadata, 4, backend="triton")
        return combine_capacity(buffers, metadata, 3, weights_TK=weights, backend="triton")

    x.requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x, ids, weights)
    assert torch.equal(y, layer(x, ids, weights))
    y.sum().backward()


def test_opcheck():
    _, metadata, x, weights = inputs(dtype=torch.float32)
    m, ops = metadata, torch.ops.expertmesh
    maps = (m.offsets_E, m.token_of_row_N, m.slot_of_row_N, m.row_of_slot_N)
    rows = torch.randn(36, 6, device=DEVICE, requires_grad=True)
    torch.library.opcheck(ops.fill_places.default, (x.requires_grad_(), *maps, 4))
    torch.library.opcheck(ops.weighted_sum.default, (rows, weights, *maps, 3, None))
    buffers = torch.randn(20, 6, device=DEVICE, requires_grad=True)
    torch.library.opcheck(ops.weighted_sum.default, (buffers, None, *maps, 3, 4))


def test_mistakes_are_told():
    _, metadata, x, weights = inputs()
    rows, buffers = torch.zeros(36, 6, device=DEVICE), torch.zeros(5, 2, 6, device=DEVICE)
    with pytest.raises(ConfigError, match="x has 7 tokens"):
        dispatch_capacity(x[:7], metadata, 2)
    with pytest.raises(ConfigError, match="y has 35 rows"):
        weighted_combine(rows[1:], metadata, weights)
    with pytest.raises(ConfigError, match=r"weights have shape \(36, 1\)"):
        combine_capacity(buffers, metadata, 3, weights_TK=weights.view(36, 1))
    with pytest.raises(ConfigError, match=r"weights have shape \(11, 3\); it must be \(12, 3\)"):
        weighted_combine(rows, metadata, weights[1:])
    with pytest.raises(ConfigError, match="capacity is 0"):
        dispatch_capacity(x, metadata, 0)
    with pytest.raises(ConfigError, match=r"below 2\*\*31"):
        dispatch_capacity(x, metadata, 2**30)
    with pytest.raises(ConfigError, match="4 experts and metadata 5"):
        combine_capacity(torch.zeros(4, 2, 6, device=DEVICE), metadata, 3)
