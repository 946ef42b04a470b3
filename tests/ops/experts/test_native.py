"""The experts by the kernels in C, with every instruction set that this processor has."""

import random
from dataclasses import replace

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.adapters import of_runs
from tests.support.experts_case import ExpertsCase, draw_ids
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.functional import route_metadata
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.moe_mlp import compute, moe_mlp
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.quantized.pack import from_nibbles, nibbles
from expertmesh.ops.quantized.rounding import Rounded, rounded, widened

pytestmark = pytest.mark.usefixtures("instructions")
TYPES = (torch.bfloat16, torch.float32)
ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu2", "silu", "clamped_swiglu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_call(shape, *, dtype=torch.bfloat16, activation="swiglu", kind="uniform", bias=False, **options):
    """Call with ids, batch-invariant so that nothing else serves it."""
    T, D, F, E, K = shape
    torch.manual_seed(T + D)
    case = ExpertsCase.draw(shape, activation=activation, dtype=dtype, bias=bias)
    experts = ExpertWeights.of(case.w_in_EGFD, case.w_out_EDF, activation, b_in=case.b_in_EGF, b_out=case.b_out_ED)
    ids_TK = draw_ids(kind, T, K, E)
    return ExpertsCall(case.x_TD, case.weights_TK, experts, "auto", ids_TK, batch_invariant=True, **options)


def oracle(call, dtype):
    """Plain PyTorch in a type."""
    experts = call.experts.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    (b_in,) = experts.b_in or (None,)
    return moe_mlp(
        call.x_TD.to(dtype),
        experts.w_in[0],
        experts.w_out[0],
        call.weights_TK.to(wide),
        route_metadata(call.ids_TK, experts.num_experts),
        activation=experts.activation,
        b_in_EGF=b_in,
        b_out_ED=experts.b_out,
        backend="reference",
    )


def computed(call):
    with torch.no_grad(), poisoned_empty():
        assert BACKENDS["native"].serves(call._replace(experts=call.experts.by_slot()))
        return compute(call)


def check(call):
    dtype = call.x_TD.dtype
    y_TD = computed(call)
    assert_two_times(y_TD, oracle(call, dtype), oracle(call, torch.float64), what="y", dtype=dtype)
    return y_TD


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(dtype, activation, bias):
    check(make_call((37, 96, 64, 6, 2), dtype=dtype, activation=activation, bias=bias))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((1, 32, 32, 1, 1), "uniform"),  # one tile
        ((5, 33, 47, 7, 7), "uniform"),  # odd D and F, K = E
        ((3, 31, 1, 7, 2), "dropped"),
        ((40, 1, 17, 1, 1), "uniform"),
        ((19, 97, 130, 5, 3), "hot"),
        ((70, 97, 130, 7, 3), "sparse"),
        ((50, 97, 130, 7, 3), "zipf"),
        ((0, 32, 32, 7, 2), "dropped"),
        ((2, 640, 272, 64, 4), "uniform"),  # more experts than rows
    ],
)
def test_odd_sizes_and_empty_experts(dtype, shape, kind):
    check(make_call(shape, dtype=dtype, kind=kind, bias=shape[0] % 2 == 0))


@pytest.mark.parametrize("seed", range(16))
def test_sizes_that_nobody_chose(seed):
    """For `make kernels-sanitized`, too: each size is drawn, odd ones and those beside a block's included."""
    draw = random.Random(seed)
    num_experts = draw.choice((1, 2, 7, 33))
    T, top_k = draw.choice((1, 2, 15, 16, 17, 65, 130)), draw.randint(1, min(num_experts, 4))
    shape = (T, draw.randint(1, 200), draw.randint(1, 150), num_experts, top_k)
    kind = draw.choice(("uniform", "hot", "sparse", "dropped", "zipf"))
    options = {"dtype": draw.choice(TYPES), "activation": draw.choice(ACTIVATIONS)}
    check(make_call(shape, kind=kind, bias=seed % 2 == 0, **options))


def test_more_rows_of_an_expert_than_panels_hold():
    check(make_call((900, 512, 512, 2, 2), activation="geglu"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [64, 70])
def test_a_row_has_the_same_bits_in_every_batch(dtype, dim):
    call = make_call((700, dim, 96, 6, 2), dtype=dtype, kind="dropped", bias=True)
    whole = computed(call)
    sizes = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100, 256]
    first = 0
    for size in sizes:
        for at in (first, 700 - size):
            rows = slice(at, at + size)
            part = call._replace(x_TD=call.x_TD[rows], ids_TK=call.ids_TK[rows], weights_TK=call.weights_TK[rows])
            assert torch.equal(computed(part), whole[rows]), (size, at)
        first += 7


@pytest.mark.parametrize("format", ["dense", "int8", "int4"])
def test_a_row_has_the_same_bits_beside_so_many_that_weights_go_in_pieces(format):
    """Alone, in pieces that are used once, for all places at once, in several rounds of places, in several chunks."""
    shape = (1500, 544, 288, 2, 1)
    if format == "dense":
        call = make_call(shape, kind="hot", bias=True)
    else:
        call, _ = quantized_call(format, shape=shape)
    whole = computed(call)
    for size in (1, 33, 160, 300, 700):
        for at in (3, 1500 - size):
            rows = slice(at, at + size)
            part = call._replace(x_TD=call.x_TD[rows], ids_TK=call.ids_TK[rows], weights_TK=call.weights_TK[rows])
            assert torch.equal(computed(part), whole[rows]), (size, at)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_two_threads_compute_the_bits_of_one(dtype, num_tokens, two_threads):
    call = make_call((num_tokens, 256, 96, 6, 2), dtype=dtype, bias=True)
    together = computed(call)
    torch.set_num_threads(1)
    assert torch.equal(computed(call), together)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_finite_stays_its_tokens(dtype):
    call = make_call((40, 70, 50, 5, 2), dtype=dtype, kind="dropped")
    plain = computed(call)
    x_TD = call.x_TD.clone()
    x_TD[7] = torch.nan
    x_TD[20] = torch.inf
    found = computed(call._replace(x_TD=x_TD))
    assert found[7].isnan().all() or (call.ids_TK[7] == 5).all()
    others = torch.ones(40, dtype=torch.bool).index_fill(0, torch.tensor([7, 20]), False)
    assert torch.equal(found[others], plain[others])


def test_masked_rows_and_experts_without_rows_may_hold_anything():
    """Nothing is multiplied by zero to leave it out."""
    call = make_call((20, 70, 50, 5, 2), kind="dropped")
    call.ids_TK[4] = 5
    call.ids_TK[call.ids_TK == 3] = 2
    plain = computed(call)
    x_TD, w_in, w_out = (
        call.x_TD.clone(),
        call.experts.w_in[0].clone(),
        call.experts.w_out[0].clone(),
    )
    x_TD[4], w_in[3], w_out[3] = torch.nan, torch.nan, torch.inf
    weights_TK = call.weights_TK.masked_fill(call.ids_TK == 5, torch.nan)
    found = computed(call._replace(x_TD=x_TD, weights_TK=weights_TK, experts=ExpertWeights.of(w_in, w_out, "swiglu")))
    assert torch.equal(found, plain)
    assert not found[4].any()


@pytest.mark.parametrize("ids", [[[0, 8]], [[-1, 2]], [[1, 2], [3, 9]]])
def test_refuses_ids_out_of_range(ids):
    call = make_call((len(ids), 32, 32, 7, 2))
    with pytest.raises(ConfigError, match=r"expert_ids holds (-1|8|9); it must be from 0 to 7"):
        computed(call._replace(ids_TK=torch.tensor(ids)))


def quantized_call(
    format,
    *,
    group_size=32,
    scale_dtype=torch.bfloat16,
    shape=(21, 96, 64, 5, 2),
    dtype=torch.bfloat16,
):
    """Call with rounded weights, and the same call with what they stand for."""
    call = make_call(shape, dtype=dtype, bias=True)
    stored, wide, scales = {}, {}, {}
    for name in ("w_in", "w_out"):
        w = getattr(call.experts, name)[0]
        found = rounded(w.flatten(0, -2), format, group_size=group_size, scale_dtype=scale_dtype)
        values = found.values.view(w.shape)
        scales[name] = found.scales.view(*w.shape[:-1], -1)
        stored[name] = nibbles(values) if format == "int4" else values
        wide[name] = (
            values.double().unflatten(-1, (scales[name].shape[-1], -1)) * scales[name].double()[..., None]
        ).flatten(-2)
    given = ExpertWeights(
        (stored["w_in"],), (stored["w_out"],), "swiglu", call.experts.b_in, call.experts.b_out, format,
        (scales["w_in"],), (scales["w_out"],),
    )  # fmt: skip
    meant = ExpertWeights.of(
        wide["w_in"],
        wide["w_out"],
        "swiglu",
        b_in=call.experts.b_in[0].double(),
        b_out=call.experts.b_out.double(),
    )
    return call._replace(experts=given), call._replace(experts=meant)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale_dtype", TYPES)
@pytest.mark.parametrize(("format", "group_size"), [("int8", 0), ("int4", 32), ("int4", 64)])
@pytest.mark.parametrize("shape", [(21, 128, 64, 5, 2), (3, 64, 192, 1, 1)])
def test_weights_in_8_and_4_bits(format, group_size, scale_dtype, shape, dtype):
    given, meant = quantized_call(format, group_size=group_size, scale_dtype=scale_dtype, shape=shape, dtype=dtype)
    y_TD = computed(given)
    # the product of a number and its scale is rounded to the scales' type, or to that of the products
    wide = torch.promote_types(dtype, torch.float32)
    plain = oracle(meant._replace(experts=meant.experts.to(dtype)), dtype)
    rounded_to = dtype if scale_dtype == dtype else torch.bfloat16
    exact = oracle(meant, torch.float64)
    assert_two_times(
        y_TD,
        [plain, oracle(meant._replace(experts=meant.experts.to(rounded_to)), dtype)],
        exact,
        what="y",
        dtype=dtype,
    )
    whole = y_TD
    for t in range(len(whole)):
        part = given._replace(
            x_TD=given.x_TD[t : t + 1],
            ids_TK=given.ids_TK[t : t + 1],
            weights_TK=given.weights_TK[t : t + 1].to(wide),
        )
        assert torch.equal(computed(part)[0], whole[t])


def test_int8_with_an_odd_number_of_columns():
    given, meant = quantized_call("int8", shape=(9, 33, 47, 3, 2))
    assert_two_times(
        computed(given),
        oracle(meant, torch.bfloat16),
        oracle(meant, torch.float64),
        what="y",
        dtype=torch.bfloat16,
    )


def test_int4_has_the_bits_of_the_weights_it_stands_for():
    given, meant = quantized_call("int4", group_size=64, shape=(21, 128, 64, 5, 2))
    experts = given.experts
    dense = [
        widened(Rounded(from_nibbles(packed), scales), torch.bfloat16)
        for packed, scales in (
            (experts.w_in[0], experts.scales_in[0]),
            (experts.w_out[0], experts.scales_out[0]),
        )
    ]
    same = ExpertWeights.of(*dense, "swiglu", b_in=experts.b_in[0], b_out=experts.b_out)
    assert torch.equal(computed(given), computed(given._replace(experts=same)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [None, [16, 50]])
def test_training_has_the_bits_of_inference_and_gradients(dtype, sizes):
    """With whole weights and with slices: the pre-activations are the forward's own."""
    call = make_call((30, 40, 66, 5, 2), dtype=dtype, kind="dropped", bias=True, activation="geglu")
    expected = computed(call)
    named = {"b_in": list(call.experts.b_in), "b_out": call.experts.b_out}
    w_in, w_out = call.experts.w_in[0], call.experts.w_out[0]
    own = call.experts
    if sizes:
        named["b_in"] = named["b_in"][0].split(sizes, 2)
        own = ExpertWeights.of(w_in.split(sizes, 2), w_out.split(sizes, 2), "geglu", **named)
    leaves = [p.detach().clone().requires_grad_() for p in own.parameters]
    x_TD = call.x_TD.clone().requires_grad_()
    y_TD = compute(call._replace(experts=own.with_parameters(leaves), x_TD=x_TD))
    assert torch.equal(y_TD.detach(), expected)
    found = torch.autograd.grad(y_TD.square().sum(), [x_TD, *leaves])
    sides = []
    for kind in (dtype, torch.float64):
        wide = [p.detach().to(kind).requires_grad_() for p in (x_TD, *own.parameters)]
        weights_TK = call.weights_TK.to(torch.promote_types(kind, torch.float32))
        plain = call._replace(
            x_TD=wide[0], experts=own.with_parameters(wide[1:]), weights_TK=weights_TK,
            backend="reference", batch_invariant=False,
        )  # fmt: skip
        sides.append(torch.autograd.grad(compute(plain).square().sum(), wide))
    for i, (ours, plain, exact) in enumerate(zip(found, *sides, strict=True)):
        assert_two_times(ours, plain, exact, what=f"gradient {i}", dtype=dtype)


def test_experts_in_slots_have_the_same_bits():
    call = make_call((9, 40, 48, 5, 3))
    slots = torch.tensor([4, 0, 6, 1, 3])
    stored = [
        torch.full((7, *w.shape[1:]), torch.nan, dtype=w.dtype) for w in (call.experts.w_in[0], call.experts.w_out[0])
    ]
    for to, w in zip(stored, (call.experts.w_in[0], call.experts.w_out[0]), strict=True):
        to[slots] = w
    elsewhere = replace(ExpertWeights.of(*stored, "swiglu"), slot_of_expert_E=slots)
    assert torch.equal(computed(call._replace(experts=elsewhere)), computed(call))


@pytest.mark.parametrize("dtype", TYPES)
def test_ordinary_calls_are_served_without_gradients_only(dtype):
    call = make_call((3, 32, 32, 7, 2), dtype=dtype)._replace(batch_invariant=False)
    assert BACKENDS["native"].serves(call)
    call.experts.w_in[0].requires_grad_()
    assert not BACKENDS["native"].serves(call)
    with torch.no_grad():
        assert BACKENDS["native"].serves(call)
        assert not BACKENDS["native"].serves(call._replace(backend="reference"))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_with_adapters_have_the_same_bits_alone_and_beside_others(dtype):
    call = make_call((37, 70, 50, 5, 2), dtype=dtype, bias=True)
    generator = torch.Generator().manual_seed(5)

    def low_rank(rows, columns):
        a, b = (
            torch.randn(5, 3, columns, generator=generator),
            torch.randn(5, rows, 3, generator=generator),
        )
        return LowRank(a.to(dtype), (0.5 * b).to(dtype), 1.0, False)

    def adapted(call, runs):
        with torch.no_grad():
            return compute(call._replace(of_tokens=of_runs(len(call.x_TD), runs)))

    runs = (
        (0, 20, low_rank(100, 70), low_rank(70, 50)),
        (24, 30, None, low_rank(70, 50)),
    )
    whole, plain = adapted(call, runs), computed(call)
    for t in range(37):
        part = call._replace(
            x_TD=call.x_TD[t : t + 1],
            ids_TK=call.ids_TK[t : t + 1],
            weights_TK=call.weights_TK[t : t + 1],
        )
        own = [run for run in runs if run[0] <= t < run[1]]
        found = adapted(part, [(0, 1, *run[2:]) for run in own])
        assert torch.equal(found[0], whole[t]), t
        assert torch.equal(whole[t], plain[t]) != bool(own), t
