"""The experts for a few rows on the CPU: what text generation calls instead of the operator."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.calls import calls_of
from tests.support.experts_case import sums_of_experts
from tests.support.poison import poisoned_empty

from expertmesh import MoELayer
from expertmesh.errors import ConfigError
from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.kernels.cpu.library import Loaded
from expertmesh.ops.cpu import compiled_products
from expertmesh.ops.experts import few_rows

FLOATS = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _all_processors_multiply_bf16(processor):
    processor(has_bf16=True, loaded=Loaded(None))


@pytest.fixture
def compiled(cpp_compiler, processor, threshold):
    """Compiled products of small weights too; gives a list of them."""
    processor(mkl_holds_back=True)
    threshold(compiled_products, "SMALLEST", 1)
    with calls_of(compiled_products.product) as products:
        yield products


def make_call(dtype, *, num_tokens, num_experts=6, top_k=2, dim=32, hidden_dim=48, branches=2):
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    ids_TK = torch.randint(0, num_experts + 1, (num_tokens, top_k), generator=generator)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    w_in, w_out = randn(num_experts, branches, hidden_dim, dim), randn(num_experts, dim, hidden_dim)
    return randn(num_tokens, dim), w_in, w_out, ids_TK, weights_TK


def general(call, dtype, activation):
    """The oracle, in a type of its own."""
    x, w_in, w_out, ids_TK, weights_TK = call
    metadata = route_metadata(ids_TK, w_in.shape[0])
    wide = torch.promote_types(dtype, weights_TK.dtype)
    cast = (x.to(dtype), w_in.to(dtype), w_out.to(dtype), weights_TK.to(wide))
    return moe_mlp(*cast, metadata, activation=activation, backend="reference")


def check(call, activation):
    dtype = call[0].dtype
    x, w_in, w_out, ids_TK, weights_TK = call
    assert few_rows.serves(x, ids_TK.numel(), w_in, w_out, weights_TK, backend="auto")
    with poisoned_empty():
        ours = few_rows.moe_mlp_of_few(*call, activation=activation)
    plain, exact = (general(call, t, activation) for t in (dtype, torch.float64))
    sums = sums_of_experts(*call, activation=activation) if dtype == torch.float32 else None
    assert_two_times(ours, plain, exact, what="y", dtype=dtype, sums=sums)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 13])
@pytest.mark.parametrize("num_experts", [6, 40])  # many live of few, few live of many
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_agrees_with_the_oracle(dtype, num_tokens, num_experts, activation):
    branches = 2 if activation == "swiglu" else 1
    check(
        make_call(dtype, num_tokens=num_tokens, num_experts=num_experts, branches=branches),
        activation,
    )


def check_biased(call, activation="clamped_swiglu"):
    """With biases of the size of the sums, beside the oracle; None: the general way has to."""
    x, w_in, w_out, ids_TK, weights_TK = call
    biases = [4 * torch.randn(w.shape[:-1]).to(x.dtype) for w in (w_in, w_out)]
    named = dict(zip(("b_in_EGF", "b_out_ED"), biases, strict=True))
    with poisoned_empty():
        ours = few_rows.moe_mlp_of_few(*call, activation=activation, **named)
    sides = []
    for dtype in (x.dtype, torch.float64):
        wide = torch.promote_types(dtype, weights_TK.dtype)
        cast = (x.to(dtype), w_in.to(dtype), w_out.to(dtype), weights_TK.to(wide))
        own = {name: b.to(dtype) for name, b in named.items()}
        how = {"activation": activation, "backend": "reference", **own}
        sides.append(moe_mlp(*cast, route_metadata(ids_TK, len(w_in)), **how))
    if ours is not None:
        assert_two_times(ours, *sides, what="y", dtype=x.dtype)
    return ours


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 5, 13])
@pytest.mark.parametrize("num_experts", [6, 40])
def test_biases_are_added_before_anything_is_rounded(dtype, num_tokens, num_experts):
    """What rounds H first, products in BF16 that are not compiled, leaves it to the general way."""
    call = make_call(dtype, num_tokens=num_tokens, num_experts=num_experts)
    assert (check_biased(call) is None) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("ids", [[[2, 1]], [[2, 2], [5, 6]], [[0, 3], [6, 6], [3, 3]]])
def test_compiled_products_with_biases(compiled, dtype, ids):
    x, w_in, w_out, _, weights_TK = make_call(dtype, num_tokens=len(ids))
    assert check_biased((x, w_in, w_out, torch.tensor(ids), weights_TK)) is not None
    assert len(compiled) == 2


def test_biases_that_want_gradients_go_the_general_way():
    layer = make_layer(bias=True).eval()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith("b_out"))
    with calls_of(few_rows.moe_mlp_of_few) as few:
        layer(torch.randn(3, 32))[0].sum().backward()
    assert not few and layer.experts.b_out.grad.any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("holds_back", [False, True])
def test_weights_as_large_as_those_that_go_first(processor, dtype, num_tokens, holds_back):
    processor(mkl_holds_back=holds_back)
    check(make_call(dtype, num_tokens=num_tokens, dim=260, hidden_dim=264), "swiglu")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ids", [[[2, 2]], [[6, 1]], [[6, 6]], [[0, 3], [6, 6], [3, 3]]])
def test_choices_twice_and_dead(dtype, ids):
    x, w_in, w_out, _, weights_TK = make_call(dtype, num_tokens=len(ids))
    check((x, w_in, w_out, torch.tensor(ids), weights_TK), "swiglu")


@pytest.mark.parametrize("ids", [[[0, 7]], [[-1, 2]], [[1, 2], [3, 9]]])
def test_refuses_ids_out_of_range(ids):
    x, w_in, w_out, _, weights_TK = make_call(torch.float32, num_tokens=len(ids))
    with pytest.raises(
        ConfigError, match=r"expert_ids holds .*; it must be from 0 to 6 .*no expert"
    ):
        few_rows.moe_mlp_of_few(x, w_in, w_out, torch.tensor(ids), weights_TK, activation="swiglu")


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("num_tokens", [1, 2, 13])
@pytest.mark.parametrize("num_experts", [6, 40])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_compiled_products_agree_with_the_oracle(
    compiled, dtype, num_tokens, num_experts, activation
):
    branches = 2 if activation == "swiglu" else 1
    check(
        make_call(dtype, num_tokens=num_tokens, num_experts=num_experts, branches=branches),
        activation,
    )
    assert len(compiled) == 2


@pytest.mark.parametrize("ids", [[[2, 2], [5, 6]], [[6, 1], [1, 0]], [[0, 3], [6, 6], [3, 3]]])
def test_compiled_products_with_choices_twice_and_dead(compiled, ids):
    x, w_in, w_out, _, weights_TK = make_call(torch.bfloat16, num_tokens=len(ids))
    check((x, w_in, w_out, torch.tensor(ids), weights_TK), "swiglu")
    assert compiled


@pytest.mark.parametrize(("dim", "hidden_dim"), [(32, 48), (48, 32)])
def test_one_of_the_products_may_be_compiled(compiled, threshold, dim, hidden_dim):
    call = make_call(torch.bfloat16, num_tokens=2, dim=dim, hidden_dim=hidden_dim)
    x, w_in, w_out, _, weights_TK = call
    threshold(compiled_products, "_ROW_ELEMENTS", 64)  # two rows of 32
    check((x, w_in, w_out, torch.tensor([[4, 1], [4, 1]]), weights_TK), "swiglu")
    assert len(compiled) == 1


@pytest.mark.parametrize("ids", [[[6, 6]], [[0, 6], [6, 0]], [[0, 1]] * 9])
def test_where_compiled_products_do_not_pay(ids, threshold):
    x, w_in, w_out, _, weights_TK = make_call(torch.bfloat16, num_tokens=len(ids))
    # no block, one block, more than two per expert
    threshold(compiled_products, "SMALLEST", 1)
    with calls_of(compiled_products.product) as products:
        check((x, w_in, w_out, torch.tensor(ids), weights_TK), "swiglu")
    assert products == []


def test_the_layer_uses_compiled_products(compiled):
    layer, x_TD = make_layer().eval(), torch.randn(5, 32)
    with torch.inference_mode():
        y_TD, _ = layer(x_TD)
    assert compiled
    with_gradients = layer(x_TD)[0].detach()
    exact = layer.double()(x_TD.double())[0].detach()
    assert_two_times(y_TD, with_gradients, exact, what="y", dtype=torch.float32)


def test_a_type_without_products_is_served_by_compiled_ones(compiled, processor, threshold):
    call = make_call(torch.float16, num_tokens=9, num_experts=3)
    x, w_in, w_out, ids_TK, weights_TK = call
    processor(has_bf16=False)
    check(call, "swiglu")
    assert compiled
    many = (x, w_in, w_out, ids_TK.clamp(max=0), weights_TK)
    assert few_rows.moe_mlp_of_few(*many, activation="swiglu") is None
    threshold(compiled_products, "SMALLEST", 1 << 60)
    assert not few_rows.serves(x, 18, w_in, w_out, weights_TK, backend="auto")


def test_leaves_an_expert_with_many_rows_to_the_general_way():
    x, w_in, w_out, _, weights_TK = make_call(torch.float32, num_tokens=few_rows.MOST_ROWS + 1)
    ids_TK = torch.zeros_like(weights_TK, dtype=torch.int64)
    ids_TK[:, 1] = 6
    call = (x, w_in, w_out, ids_TK, weights_TK)
    assert few_rows.moe_mlp_of_few(*call, activation="swiglu") is None
    fewer = tuple(t[1:] if len(t) == len(x) else t for t in call)
    assert few_rows.moe_mlp_of_few(*fewer, activation="swiglu") is not None


def make_layer(**options):
    shape = {"dim": 32, "hidden_dim": 48, "num_experts": 6, "top_k": 2, "seed": 0}
    return MoELayer(**(shape | options))


@pytest.mark.parametrize(
    ("options", "is_used"),
    [
        ({}, True),
        ({"backend": "torch"}, True),
        ({"backend": "reference"}, False),
        ({"bias": True}, True),
        ({"batch_invariant": True}, False),
        ({"capacity_factor": 1.0, "eval_capacity_factor": 1.0}, True),
    ],
)
def test_the_layer_takes_it_without_gradients(options, is_used):
    layer, x_TD = make_layer(**options).eval(), torch.randn(5, 32)
    with calls_of(few_rows.moe_mlp_of_few) as few:
        with_gradients, _ = layer(x_TD)
        assert not few
        with torch.no_grad():
            y_TD, _ = layer(x_TD)
    assert bool(few) == is_used
    exact = layer.double()(x_TD.double())[0]
    assert_two_times(y_TD, with_gradients.detach(), exact.detach(), what="y", dtype=torch.float32)


def test_the_layer_does_not_take_it_for_many_tokens_or_under_autocast():
    layer = make_layer().eval()
    with torch.no_grad(), calls_of(few_rows.moe_mlp_of_few) as few:
        layer(torch.randn(few_rows.MOST_SLOTS, 32))
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(3, 32))
    assert few == []


def test_an_expert_with_many_rows_sends_the_call_back_to_the_operator():
    layer = make_layer(normalize_weights="none").eval()
    x = torch.randn(1, 32).expand(few_rows.MOST_ROWS + 1, -1)
    with torch.no_grad():
        y, _ = layer(x)
    assert_two_times(
        y,
        layer(x)[0].detach(),
        layer.double()(x.double())[0].detach(),
        what="y",
        dtype=torch.float32,
    )
