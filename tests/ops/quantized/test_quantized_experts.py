"""Experts in 8 and 4 bits compute what their widened matrices compute, by whichever backend."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times

from expertmesh.moe.experts import GroupedExperts
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import FORMATS, ExpertWeights

E = 5
FORMS = ("int8", "int4", "fp8")


def experts(form, *, dim=128, hidden_dim=64, dtype=torch.bfloat16, activation="swiglu", bias=False):
    """Quantised experts with random weights."""
    sizes = {"num_experts": E, "dim": dim, "hidden_dim": hidden_dim}
    made = GroupedExperts(**sizes, activation=activation, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("w_in", "w_out"):
            w = getattr(made, name)
            w.copy_(0.2 * torch.randn(w.shape, generator=generator))
        for name in ("b_in", "b_out") if bias else ():
            b = getattr(made, name)
            b.copy_(torch.randn(b.shape, generator=generator))
    made.convert(form, group_size=32)
    return made.eval()


def call(made, num_tokens=5, *, dtype=torch.bfloat16, backend="auto"):
    generator = torch.Generator().manual_seed(2)
    dim = made.weights().slices()[0].shape[3]
    x_TD = torch.randn(num_tokens, dim, generator=generator).to(dtype)
    order = torch.rand(num_tokens, E, generator=generator).argsort(1)
    ids_TK = order[:, :2].contiguous()
    ids_TK[-1, 1] = E  # no expert
    given = x_TD, torch.rand(num_tokens, 2, generator=generator), ids_TK
    x_TD, weights_TK, ids_TK = (t.to(made.w_in.device) for t in given)
    return ExpertsCall(x_TD, weights_TK, made.weights(), backend, ids_TK)


def dense(made, dtype):
    one = made.weights().slices()[0].unpacked(torch.float64)
    biases = {"b_in": one.b_in_EGF, "b_out": one.b_out_ED}
    biases = {name: None if b is None else b.to(dtype) for name, b in biases.items()}
    w_in, w_out = one.w_in_EGFD.to(dtype), one.w_out_EDF.to(dtype)
    return ExpertWeights.of(w_in, w_out, made.activation, **biases)


def assert_computes(made, c):
    """The result beside that of the widened matrices, in FP64 and in the type of the tokens."""
    with torch.no_grad():
        found = compute(c)
        c = c._replace(backend="reference", batch_invariant=False)
        exact = c._replace(x_TD=c.x_TD.double(), experts=dense(made, torch.float64))
        plain = c._replace(experts=dense(made, c.x_TD.dtype))
        assert_two_times(found, compute(plain), compute(exact), what=made.format)


@pytest.mark.parametrize("num_tokens", [1, 5, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_widened_matrices_are_multiplied(form, dtype, num_tokens):
    made = experts(form, dtype=dtype)
    assert_computes(made, call(made, num_tokens, dtype=dtype))


@pytest.mark.parametrize("form", FORMS)
def test_other_ways_to_compute(form):
    made = experts(form, activation="relu2", bias=True)
    assert_computes(made, call(made))
    made = experts(form, dim=96, hidden_dim=160)
    for options in ({"batch_invariant": True}, {"backend": "reference"}):
        assert_computes(made, call(made)._replace(**options))


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_that_are_stored(form):
    made = experts(form)
    weights = made.weights()
    one = weights.slices()[0]
    stored = FORMATS[form].num_bytes(one.shape, torch.bfloat16)
    if form == "int4":  # counted for groups of 64
        assert stored < weights.num_bytes == stored + stored // 17
    else:
        assert weights.num_bytes == stored
    dense_bytes = E * 3 * 64 * 128 * 2
    assert weights.num_bytes < dense_bytes * (0.32 if form == "int4" else 0.53)


def test_types_stay_when_a_model_is_cast():
    made = experts("int8").to(torch.float32)
    assert made.w_in.dtype == torch.int8 and made.w_in_scale.dtype == torch.bfloat16
