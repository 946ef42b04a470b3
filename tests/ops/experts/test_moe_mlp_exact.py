"""`moe_mlp` against a loop over tokens in FP64, by the two-times rule; gradients too."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.expert_oracle import experts_per_token
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh.config.moe_rules import Activation
from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.ops.activation import num_branches
from expertmesh.ops.experts import torch_forward as expert_loop

ACTIVATIONS = list(Activation.__args__)
NAMES = ("x", "w_in", "w_out", "weights", "b_in", "b_out")


def expert_ids(kind, num_tokens, top_k, num_experts):
    """Ids of a kind of routing: uniform, hot (one expert), dead (some slots empty), zipf (skewed)."""
    if kind == "hot":
        return torch.full((num_tokens, top_k), num_experts // 2)
    if kind == "zipf":
        p = 1.0 / torch.arange(1, num_experts + 1, dtype=torch.float64)
        return (
            torch.multinomial(p, num_tokens * top_k, replacement=True).view(num_tokens, top_k)
            if num_tokens
            else torch.zeros(0, top_k, dtype=torch.int64)
        )
    return torch.randint(0, num_experts + (kind == "dead"), (num_tokens, top_k))


def problem(num_tokens, top_k, num_experts, dim, hidden_dim, activation, *, bias):
    """FP64 leaves (x, w_in, w_out, weights, b_in, b_out), already rounded to BF16 so that every dtype holds them."""
    G = num_branches(activation)
    shapes = [
        (num_tokens, dim),
        (num_experts, G, hidden_dim, dim),
        (num_experts, dim, hidden_dim),
        (num_tokens, top_k),
    ]
    shapes += [(num_experts, G, hidden_dim), (num_experts, dim)] if bias else []
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[1] /= dim**0.5
    tensors[2] /= hidden_dim**0.5
    tensors[3].abs_()
    leaves = [t.to(torch.bfloat16).double() for t in tensors]
    return leaves if bias else [*leaves, None, None]


def with_gradients(function, leaves, dtype, grad, *, weights_dtype=None):
    """Run and give [y, gradients...] with every leaf in this dtype (the routing weights in theirs)."""
    inputs = []
    for index, leaf in enumerate(leaves):
        to = weights_dtype if index == 3 and weights_dtype else dtype
        inputs.append(None if leaf is None else leaf.to(to).requires_grad_())
    y = function(*inputs)
    present = [t for t in inputs if t is not None]
    return [y.detach(), *torch.autograd.grad(y, present, grad.to(y.dtype), allow_unused=True)]


def check(shape, kind, activation, dtype, *, bias, backend="auto"):
    num_tokens, top_k, num_experts, dim, hidden_dim = shape
    leaves = problem(num_tokens, top_k, num_experts, dim, hidden_dim, activation, bias=bias)
    ids = expert_ids(kind, num_tokens, top_k, num_experts)
    metadata = route_metadata(ids, num_experts)
    grad = torch.randn(num_tokens, dim).to(torch.bfloat16).double()

    def ours(x, w_in, w_out, weights, b_in, b_out):
        return moe_mlp(
            x,
            w_in,
            w_out,
            weights,
            metadata,
            activation=activation,
            b_in_EGF=b_in,
            b_out_ED=b_out,
            backend=backend,
        )

    def plain(*inputs):
        return experts_per_token(*inputs, expert_ids_TK=ids, activation=activation)

    weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    ways = []
    # expert by expert, and all rows of a small call together
    for limit in (0, expert_loop.FEW_ELEMENTS):
        with poisoned_empty(), patch.object(expert_loop, "FEW_ELEMENTS", limit):
            ways.append(with_gradients(ours, leaves, dtype, grad, weights_dtype=weights_dtype))
    oracle = with_gradients(plain, leaves, torch.float64, grad)
    rival = with_gradients(plain, leaves, dtype, grad, weights_dtype=weights_dtype)
    names = ["y", *(n for n, leaf in zip(NAMES, leaves, strict=True) if leaf is not None)]
    for results in ways:
        for name, a, b, exact in zip(names, results, rival, oracle, strict=True):
            exact = torch.zeros_like(a, dtype=torch.float64) if exact is None else exact
            b = torch.zeros_like(a) if b is None else b
            if dtype == torch.float64:
                assert_close_fp64(a, exact, what=name)
            else:
                assert_two_times(a, b, exact, what=f"{name} {dtype}", dtype=dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_every_activation_and_dtype(activation, dtype, bias):
    check((23, 2, 5, 19, 21), "uniform", activation, dtype, bias=bias)


@pytest.mark.parametrize("kind", ["uniform", "hot", "dead", "zipf"])
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 3, 4, 5), (1, 1, 1, 1, 1), (1, 3, 3, 8, 16), (40, 8, 8, 16, 32), (33, 1, 7, 64, 48)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_routings(kind, shape, dtype):
    check(shape, kind, "swiglu", dtype, bias=False)
    check(shape, kind, "gelu", dtype, bias=True)


@settings(max_examples=40)
@given(
    shape=st.tuples(
        st.integers(0, 30),
        st.integers(1, 4),
        st.integers(1, 9),
        st.integers(1, 40),
        st.integers(1, 40),
    ),
    kind=st.sampled_from(["uniform", "hot", "dead", "zipf"]),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(shape, kind, activation, dtype, bias, seed):
    torch.manual_seed(seed)
    check(shape, kind, activation, dtype, bias=bias)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_reference_backend(activation):
    check((12, 2, 3, 8, 7), "dead", activation, torch.float64, bias=True, backend="reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_many_chunks(dtype):
    """More rows per expert than one element-wise chunk holds."""
    check((600, 2, 2, 24, 260), "hot", "swiglu", dtype, bias=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_row_counts_that_are_rounded_up(dtype):
    """Blocks of 64 rows and more are padded for the products; nothing of the padding or of neighbours gets in."""
    check((250, 2, 3, 24, 20), "zipf", "swiglu", dtype, bias=True)


def test_capacity_rows():
    """With max_rows the row buffers are shorter than T * K, and nothing changes."""
    leaves = problem(20, 2, 4, 8, 6, "swiglu", bias=False)
    ids = expert_ids("dead", 20, 2, 4)
    short = route_metadata(ids, 4, max_rows=int((ids < 4).sum()) + 1)
    y = [moe_mlp(*leaves[:4], metadata, activation="swiglu") for metadata in (short, route_metadata(ids, 4))]
    assert torch.equal(y[0], y[1])
