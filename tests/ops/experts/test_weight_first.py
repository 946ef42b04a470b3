"""Experts by products with the weight as the left factor, which AMX reads as it is stored."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.ops.experts import weight_first
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights

E, D, F, K = 6, 64, 96, 2


@pytest.fixture(autouse=True)
def _with_tiles(processor, threshold):
    """A processor with AMX, and small weights."""
    processor(has_tiles=True)
    threshold(weight_first, "FEWEST_WEIGHTS", 1)


def make_call(ids_TK, *, activation="swiglu", dtype=torch.bfloat16, dim=D, hidden_dim=F):
    generator = torch.Generator().manual_seed(len(ids_TK))

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    branches = 2 if activation.endswith("glu") else 1
    experts = ExpertWeights.of(
        randn(E, branches, hidden_dim, dim) / dim**0.5,
        randn(E, dim, hidden_dim) / hidden_dim**0.5,
        activation,
    )
    weights_TK = torch.rand(ids_TK.shape, generator=generator)
    return ExpertsCall(randn(len(ids_TK), dim), weights_TK, experts, "auto", ids_TK=ids_TK)


def drawn_ids(num_tokens, *, hot=0.0, dead=0.0):
    """Ids (T, K), of which a share is expert 1, and a share none."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids_TK = torch.randint(0, E, (num_tokens, K), generator=generator)
    ids_TK[torch.rand(num_tokens, K, generator=generator) < hot] = 1
    ids_TK[torch.rand(num_tokens, K, generator=generator) < dead] = E
    return ids_TK


def oracle(call, dtype):
    assert call.ids_TK is not None
    w = call.experts
    return moe_mlp(
        call.x_TD.to(dtype),
        w.w_in[0].to(dtype),
        w.w_out[0].to(dtype),
        call.weights_TK.to(torch.promote_types(dtype, torch.float32)),
        route_metadata(call.ids_TK, E),
        activation=w.activation,
        backend="reference",
    )


def check(call):
    """The result beside the oracle's, if it is computed here."""
    assert BACKENDS["weight_first"].serves(call)
    with poisoned_empty():
        ours = weight_first.forward(call, [])
    if ours is not None:
        sides = [oracle(call, dtype) for dtype in (torch.bfloat16, torch.float64)]
        assert_two_times(ours, *sides, what="y", dtype=torch.bfloat16)
        assert torch.equal(compute(call), ours)
    return ours


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("num_tokens", [6, 17, 24])
def test_agrees_with_the_oracle(activation, num_tokens):
    assert check(make_call(drawn_ids(num_tokens), activation=activation)) is not None


@pytest.mark.parametrize(("hot", "dead"), [(0.5, 0.0), (0.0, 0.4), (0.3, 0.3)])
@pytest.mark.parametrize("num_tokens", [15, 24])
def test_agrees_with_hot_experts_and_dead_choices(hot, dead, num_tokens):
    assert check(make_call(drawn_ids(num_tokens, hot=hot, dead=dead))) is not None


@pytest.mark.parametrize(
    "ids_TK",
    [
        drawn_ids(24, hot=0.9),  # more than 32 rows of one expert
        drawn_ids(24) % 3,  # half the experts have none
        torch.full((24, K), E),  # none has any
    ],
)
def test_many_rows_of_one_and_experts_without_rows_go_another_way(ids_TK):
    call = make_call(ids_TK)
    assert check(call) is None
    sides = [oracle(call, dtype) for dtype in (torch.bfloat16, torch.float64)]
    assert_two_times(compute(call), *sides, what="y", dtype=torch.bfloat16)


def test_a_row_that_is_not_finite_stays_its_tokens():
    call = make_call(drawn_ids(20))
    plain = compute(call)
    x_TD = call.x_TD.clone()
    x_TD[7] = torch.nan
    found = compute(call._replace(x_TD=x_TD))
    assert found[7].isnan().all()
    others = [t for t in range(20) if t != 7]
    assert torch.equal(found[others], plain[others])


@pytest.mark.parametrize("wrong", [-1, E + 1])
def test_refuses_ids_out_of_range(wrong):
    ids_TK = drawn_ids(9)
    ids_TK[2, 1] = wrong
    with pytest.raises(
        ConfigError, match=r"expert_ids holds .*; it must be from 0 to 6 .*no expert"
    ):
        compute(make_call(ids_TK))


def biased(call):
    b_in, b_out = torch.zeros(E, 2, F).bfloat16(), torch.zeros(E, D).bfloat16()
    w = call.experts
    return call._replace(
        experts=ExpertWeights.of(w.w_in[0], w.w_out[0], "swiglu", b_in=b_in, b_out=b_out)
    )


def with_gradients(call):
    return call._replace(x_TD=call.x_TD.clone().requires_grad_())


LOW_RANK = LowRank(torch.zeros(E, 2, D), torch.zeros(E, 2 * F, 2), 1.0, False)


@pytest.mark.parametrize(
    "change",
    [
        biased,
        with_gradients,
        lambda call: make_call(drawn_ids(9), dtype=torch.float32),
        lambda call: make_call(drawn_ids(9), dim=48),
        lambda call: make_call(drawn_ids(9), hidden_dim=80),
        lambda call: make_call(drawn_ids(5)),  # fewer than two choices per expert
        lambda call: make_call(drawn_ids(25)),  # more than eight
        lambda call: call._replace(batch_invariant=True),
        lambda call: call._replace(adapters=(LOW_RANK, None)),
        lambda call: call._replace(backend="reference"),
        lambda call: call._replace(backend="triton"),
    ],
)
def test_what_it_leaves_to_the_other_backends(change):
    call = make_call(drawn_ids(9))
    assert weight_first.serves(call)
    assert not weight_first.serves(change(call))


def test_small_weights_and_processors_without_tiles_go_another_way(processor, threshold):
    call = make_call(drawn_ids(9))
    threshold(weight_first, "FEWEST_WEIGHTS", call.experts.w_in[0].numel() + 1)
    assert not weight_first.serves(call)
    threshold(weight_first, "FEWEST_WEIGHTS", 1)
    processor(has_tiles=False)
    assert not weight_first.serves(call)
