"""The experts where there are no native kernels: PyTorch's products, for few rows as for many, exact if asked."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh import MoELayer
from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.library import Loaded
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _no_kernels(processor):
    processor(loaded=Loaded(None))


def make_call(dtype, *, num_tokens, num_experts=6, activation="swiglu", bias=False, **options):
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    E, G, F, D, T, K = num_experts, 2 if "swiglu" in activation else 1, 48, 32, num_tokens, 2
    ids_TK = options.pop("ids_TK", torch.randint(0, E + 1, (T, K), generator=generator))
    named = {"b_in": 4 * randn(E, G, F), "b_out": 4 * randn(E, D)} if bias else {}
    experts = ExpertWeights.of(randn(E, G, F, D), randn(E, D, F), activation, **named)
    weights_TK = torch.rand(T, K, generator=generator)
    return ExpertsCall(randn(T, D), weights_TK, experts, "auto", ids_TK, **options)


def check(call):
    with torch.no_grad(), poisoned_empty():
        y_TD = compute(call)
    sides = []
    for dtype in (call.x_TD.dtype, torch.float64):
        wide = call._replace(
            x_TD=call.x_TD.to(dtype), experts=call.experts.to(dtype), backend="reference",
            weights_TK=call.weights_TK.to(torch.promote_types(dtype, torch.float32)),
            batch_invariant=False,
        )  # fmt: skip
        sides.append(compute(wide))
    assert_two_times(y_TD, *sides, what="y", dtype=call.x_TD.dtype)
    return y_TD


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 13, 70])
@pytest.mark.parametrize("num_experts", [6, 40])  # many live of few, few live of many
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_agrees_with_the_oracle(dtype, num_tokens, num_experts, activation):
    check(make_call(dtype, num_tokens=num_tokens, num_experts=num_experts, activation=activation))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 5, 13])
def test_biases_are_added_before_anything_is_rounded(dtype, num_tokens):
    check(make_call(dtype, num_tokens=num_tokens, activation="clamped_swiglu", bias=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ids", [[[2, 2]], [[6, 1]], [[6, 6]], [[0, 3], [6, 6], [3, 3]]])
def test_choices_twice_and_dead(dtype, ids):
    check(make_call(dtype, num_tokens=len(ids), ids_TK=torch.tensor(ids)))


@pytest.mark.parametrize("ids", [[[0, 7]], [[-1, 2]], [[1, 2], [3, 9]]])
def test_refuses_ids_out_of_range(ids):
    with pytest.raises(ConfigError, match=r"expert_ids holds .*; it must be from 0 to 6"):
        compute(make_call(torch.float32, num_tokens=len(ids), ids_TK=torch.tensor(ids)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    call = make_call(dtype, num_tokens=150, bias=True, batch_invariant=True)
    whole = check(call)
    for first, size in ((0, 1), (7, 1), (149, 1), (3, 2), (20, 15), (60, 16), (11, 33), (86, 64)):
        rows = slice(first, first + size)
        part = call._replace(x_TD=call.x_TD[rows], ids_TK=call.ids_TK[rows], weights_TK=call.weights_TK[rows])
        assert torch.equal(compute(part), whole[rows]), (first, size)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"batch_invariant": True}, {"backend": "reference"}])
def test_the_layer_computes_without_gradients_what_it_does_with_them(options):
    shape = {"dim": 32, "hidden_dim": 48, "num_experts": 6, "top_k": 2, "seed": 0}
    layer, x_TD = MoELayer(**(shape | options)).eval(), torch.randn(5, 32)
    with torch.no_grad():
        y_TD, _ = layer(x_TD)
    with_gradients = layer(x_TD)[0].detach()
    exact = layer.double()(x_TD.double())[0].detach()
    assert_two_times(y_TD, with_gradients, exact, what="y", dtype=torch.float32)
