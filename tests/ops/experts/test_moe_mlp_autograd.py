"""What autograd, autocast and torch.compile see of `moe_mlp`."""

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.calls import calls_of

from expertmesh.errors import ConfigError
from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.ops.experts import torch_forward as expert_loop

T, K, E, D, F = 24, 2, 4, 16, 12


def _inputs(dtype=torch.float32, *, num_tokens=T, grad=True):
    x = torch.randn(num_tokens, D, dtype=dtype)
    w_in = torch.randn(E, 2, F, D, dtype=dtype) / D**0.5
    w_out = torch.randn(E, D, F, dtype=dtype) / F**0.5
    weights = torch.rand(num_tokens, K, dtype=torch.promote_types(dtype, torch.float32))
    return [t.requires_grad_(grad) for t in (x, w_in, w_out, weights)]


def _metadata(num_tokens=T):
    return route_metadata(torch.randint(0, E, (num_tokens, K)), E)


def test_second_derivative_is_an_error_and_the_reference_has_it():
    inputs, metadata = _inputs(), _metadata()
    y = moe_mlp(*inputs, metadata, activation="swiglu")
    (grad,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    few = [t.detach().double().requires_grad_() for t in _inputs(torch.float64, num_tokens=2)]
    small = _metadata(2)
    torch.autograd.gradgradcheck(
        lambda x: moe_mlp(x, *few[1:], small, activation="swiglu", backend="reference"), few[:1]
    )


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {3}, {1, 2}, {0, 1, 2}, {0, 3}])
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen):
    inputs, metadata = _inputs(), _metadata()
    full = torch.autograd.grad(moe_mlp(*inputs, metadata, activation="swiglu").sum(), inputs)
    some = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(inputs)]
    moe_mlp(*some, metadata, activation="swiglu").sum().backward()
    for i, tensor in enumerate(some):
        assert tensor.grad is None if i in frozen else torch.equal(tensor.grad, full[i])


def test_bitwise_deterministic_over_20_runs():
    inputs, metadata = _inputs(torch.bfloat16, num_tokens=200), _metadata(200)
    first = None
    for _ in range(20):
        y = moe_mlp(*inputs, metadata, activation="swiglu")
        now = [y, *torch.autograd.grad(y.float().square().sum(), inputs)]
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def test_inference_keeps_no_h():
    with calls_of(expert_loop.forward) as calls:
        moe_mlp(*_inputs(grad=False), _metadata(), activation="swiglu")
        with torch.no_grad():
            moe_mlp(*_inputs(), _metadata(), activation="swiglu")
        moe_mlp(*_inputs(), _metadata(), activation="swiglu")
    assert [bool(h.numel()) for _, (_, h) in calls] == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_equals_an_explicit_cast(dtype):
    inputs, metadata = _inputs(), _metadata()
    with torch.autocast("cpu", dtype=dtype):
        y = moe_mlp(*inputs, metadata, activation="swiglu")
    cast = [t.to(dtype) for t in inputs[:3]]
    expected = moe_mlp(*cast, inputs[3], metadata, activation="swiglu")
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    ours = torch.autograd.grad(y.float().sum(), inputs)
    theirs = torch.autograd.grad(expected.float().sum(), inputs)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("backend", "autocast", "sizes"),
    [
        ("torch", False, (24, 31, 7, 64)),
        ("torch", True, (24, 31, 7, 64)),
        ("triton", False, (18, 9)),
    ],
)
def test_compile_fullgraph_and_no_recompile_per_batch(backend, autocast, sizes):
    router = torch.randn(D, E, requires_grad=True)

    def block(x, w_in, w_out):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            weights, ids = (x.float() @ router).softmax(-1).topk(K)
            metadata = route_metadata(ids, E)
            return moe_mlp(x, w_in, w_out, weights, metadata, activation="swiglu", backend=backend)

    _, w_in, w_out, _ = _inputs()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, num_tokens in enumerate(sizes):
        x = torch.randn(num_tokens, D, requires_grad=True)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            y = compiled(x, w_in, w_out)
        leaves = (x, w_in, w_out, router)
        expected = block(x, w_in, w_out)
        assert torch.equal(y, expected)
        ours = torch.autograd.grad(y.float().sum(), leaves)
        theirs = torch.autograd.grad(expected.float().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_non_contiguous_inputs():
    """Equal but for the order of sums, which with several threads depends on how a factor lies in memory."""
    inputs, metadata = _inputs(torch.float64), _metadata()
    strided = [t.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for t in inputs]
    y = moe_mlp(*strided, metadata, activation="swiglu")
    expected = moe_mlp(*inputs, metadata, activation="swiglu")
    assert_close_fp64(y, expected, what="y")
    grad = torch.randn(D, T, dtype=torch.float64).T
    ours = torch.autograd.grad(y, strided, grad)
    theirs = torch.autograd.grad(expected, inputs, grad)
    for name, a, b in zip(("x", "w_in", "w_out", "weights"), ours, theirs, strict=True):
        assert_close_fp64(a, b, what=f"gradient of {name}")


def test_expanded_gradient():
    inputs, metadata = _inputs(), _metadata()
    y = moe_mlp(*inputs, metadata, activation="swiglu")
    ours = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    theirs = torch.autograd.grad(y, inputs, torch.ones(T, D))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x_TD": torch.randn(T, D + 1)}, "w_in"),
        ({"x_TD": torch.randn(T + 1, D)}, "weights"),
        ({"w_in_EGFD": torch.randn(E, 1, F, D)}, "w_in"),
        ({"w_out_EDF": torch.randn(E, F, D)}, "w_out"),
        ({"w_out_EDF": torch.randn(E, D, F, dtype=torch.bfloat16)}, "dtype"),
        ({"weights_TK": torch.rand(T, K + 1)}, "row_of_slot"),
        ({"activation": "swish"}, "swish"),
        ({"b_in_EGF": torch.randn(E, F)}, "b_in"),
        ({"b_out_ED": torch.randn(E, F)}, "b_out"),
        ({"x_TD": torch.randn(T, 2, D)}, "dimensions"),
        ({"x_TD": torch.zeros(T, D, dtype=torch.int64)}, "dtype"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_mistakes_are_one_line_errors(change, word):
    x, w_in, w_out, weights = _inputs()
    arguments = {
        "x_TD": x,
        "w_in_EGFD": w_in,
        "w_out_EDF": w_out,
        "weights_TK": weights,
        "activation": "swiglu",
    }
    with pytest.raises(ConfigError, match=word) as error:
        moe_mlp(metadata=_metadata(), **(arguments | change))
    assert "\n" not in str(error.value)
