"""Tokens that travel in 8 bits: how far they are off, what is exact in spite of it, and how many bytes move."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.oracle.numerics import assert_close_fp64, relative_error
from tests.support.ranks import world_of
from tests.support.spread_case import D, E, SpreadCase, build

from expertmesh.comm.all_to_all.flat import Counts, async_all_to_all
from expertmesh.comm.all_to_all.payload import BLOCK, packed, row_bytes, unpacked
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import Dispatched
from expertmesh.parallel.apply import degrees_of, parallelize
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Fixed

KINDS = ["int8", "float8_e4m3"]
NODES = (0, 0, 1, 1)
WAYS = {
    "flat": {},
    "parts": {"overlap_degree": 2},
    "hierarchical": {"all_to_all": "hierarchical", "nodes": NODES},
}


def rounded(x_RD, kind):
    return unpacked(packed(x_RD, kind), x_RD.shape[1], x_RD.dtype, kind)


def blocks(x_RD):
    return x_RD.split(BLOCK, dim=1)


@pytest.mark.parametrize("dim", [1, 128, 130, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int8_is_off_by_half_a_step_of_its_block(dim, dtype):
    x_RD = (torch.randn(9, dim) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    rows = packed(x_RD, "int8")
    assert rows.dtype == torch.uint8 and rows.shape == (9, row_bytes(dim, 2, "int8"))
    for x, y in zip(blocks(x_RD), blocks(rounded(x_RD, "int8")), strict=True):
        step = x.abs().amax(1, keepdim=True).double() / 127
        slack = torch.finfo(dtype if dtype == torch.bfloat16 else torch.float32).eps * x.double().abs()
        assert ((x - y).double().abs() <= step / 2 + slack).all()
        assert (y.double().abs().amax(1, keepdim=True) <= 127 * step + slack.amax(1, keepdim=True)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 128, 130])
def test_a_rank_may_get_one_row_or_none(dim, kind):
    x_RD = torch.randn(2, dim)
    assert torch.equal(rounded(x_RD[:1], kind), rounded(x_RD, kind)[:1])
    assert rounded(x_RD[:0], kind).shape == (0, dim)


def test_e4m3_keeps_three_bits_of_each_element():
    x_RD = torch.randn(50, 300)
    y_RD = rounded(x_RD, "float8_e4m3")
    for x, y in zip(blocks(x_RD), blocks(y_RD), strict=True):
        least_normal = x.abs().amax(1, keepdim=True) / 448 * 2**-6
        off = (x - y).abs() / torch.maximum(x.abs(), least_normal)
        assert off.max() <= 2**-4 * (1 + torch.finfo(torch.float32).eps * 8)
    assert off.max() > 2**-6  # it is rounded at all


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_and_what_is_not_finite_is_seen(kind):
    x_RD = torch.zeros(3, 200)
    x_RD[1, 5], x_RD[2, 150] = math.nan, math.inf
    y_RD = rounded(x_RD, kind)
    assert (y_RD[0] == 0).all()
    assert y_RD[1, :128].isnan().any() and (y_RD[1, 128:] == 0).all()
    assert not y_RD[2, 150].isfinite() and (y_RD[2, :128] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_near_the_smallest_of_all_become_zeros(kind):
    """The scale of a block of them would be rounded, to half of what it should be, and the quotient beyond the type."""
    step = 2.0**-149
    x_RD = torch.tensor([[190.0], [600.0], [1.0]]) * step * torch.ones(1, 130)
    assert x_RD.count_nonzero() == x_RD.numel() and (rounded(x_RD, kind) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_twice_is_rounding_once(kind):
    """So that a second hop costs nothing."""
    once_RD = rounded(torch.randn(40, 300), kind)
    assert relative_error(rounded(once_RD, kind), once_RD) <= torch.finfo(torch.float32).eps


def moved(way, kind):
    """Of one rank: its tokens, what they became on their way, their gradient, and bytes of the ways of x."""
    world = world_of(False)
    layer = build(SpreadCase(), torch.float64)
    exchange = spread_experts(layer, world, dispatch_dtype=kind, **way).exchange()
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids_TK = torch.stack([torch.randperm(E, generator=generator)[:3] for _ in range(20)])
    x_TD = torch.randn(20, D, generator=generator, dtype=torch.float64).requires_grad_()
    weights_TK = torch.rand(20, 3, generator=generator, dtype=torch.float64)
    tokens, y = Dispatched(x_TD, ids_TK, weights_TK), []
    parts = exchange.start_parts(tokens, way.get("overlap_degree", 1))
    with world.traffic.logged() as log:
        for dispatch_handle in parts:
            arrived = dispatch_handle.finish()
            home_RD = arrived.x_TD * arrived.weights_TK.sum(1, True)
            y.append(dispatch_handle.start_home(home_RD).finish())
        y_TD = torch.cat(y)
        y_TD.sum().backward()
    scale_T1 = weights_TK.sum(1, True)
    out = sum(t.num_bytes for t in log.transfers if "dispatch" in t.where and t.where[-1] != "d")
    return x_TD.detach(), y_TD.detach() / scale_T1, x_TD.grad, scale_T1, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tokens_arrive_rounded_and_gradients_are_exact(four_ranks, way, kind):
    for x_TD, y_TD, grad_TD, scale_T1, _ in four_ranks.run(moved, way, kind):
        assert relative_error(y_TD, rounded(x_TD, kind)) <= 4 * torch.finfo(torch.float32).eps
        assert_close_fp64(grad_TD, scale_T1.expand_as(grad_TD), what="gradient")


def bytes_out(kind):
    return moved({}, kind)[-1]


def test_fewer_bytes_travel_out(four_ranks):
    """A row of D FP64 elements, 3 weights and 3 ids in FP64, becomes one of D bytes and a scale, weights and ids."""
    in_eight, whole = (four_ranks.run(bytes_out, kind) for kind in ("int8", "same"))
    rest = 2 * 3 * 8
    for few, many in zip(in_eight, whole, strict=True):
        assert few * (8 * D + rest) == many * (row_bytes(D, 8, "int8") + rest)


def kept_until_the_backward(kind):
    """Whether the rows as they were live on behind their dispatch."""
    counts = Counts([1, 1], [1, 1])
    x_RD = torch.randn(2, D, requires_grad=True) * 1.0
    alive = weakref.ref(x_RD)
    moved = async_all_to_all(x_RD, counts, world_of(False).all_ranks(), where="a test", payload=kind)
    del x_RD
    y_RD = moved.finish()
    del moved
    gc.collect()
    return y_RD.requires_grad, alive() is not None


@pytest.mark.parametrize("kind", ["same", "int8"])
def test_rows_are_not_kept_for_the_backward(two_ranks, kind):
    assert two_ranks.run(kept_until_the_backward, kind) == [(True, False)] * 2


def through_the_configuration():
    """The option reaches the exchange of every layer of a model."""
    model = build(SpreadCase(), torch.float32)
    parallelize(model, ParallelConfig(dispatch_dtype="int8"), world=world_of(False))
    return model.dispatcher.exchange().route.payload


def test_the_option_of_a_run_reaches_the_layers(two_ranks):
    assert two_ranks.run(through_the_configuration) == ["int8"] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adaptive": True}, "with adaptive=True it is measured whether any are; leave one out"),
        ({"route_degree": 1}, "with route_degree=1 no token is dispatched; leave one out"),
    ],
)
def test_where_tokens_may_stay_it_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ParallelConfig(dispatch_dtype="int8", **options)


def test_one_rank_is_told_that_nothing_travels():
    with pytest.raises(ConfigError, match="start several with torchrun, or leave it out"):
        degrees_of(ParallelConfig(dispatch_dtype="int8"), num_ranks=1)
    with pytest.raises(ConfigError, match="with adaptive=True it is measured"):
        parallelize(torch.nn.Linear(2, 2), ParallelConfig(dispatch_dtype="int8"), adaptive=True)


def refused():
    for options, said in (
        ({"dispatch_dtype": "int4"}, "must be one of same, int8, float8_e4m3; did you mean int8"),
        (
            {"dispatch_dtype": "int8", "exchanges": partial(Fixed, bound=4)},
            "sends tokens as they are; leave one out",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            layer = build(SpreadCase(), torch.float64)
            spread_experts(layer, world_of(False), **options).exchange()

    for options in ({"dispatch_dtype": "int8"}, {"adaptive": True}, {"route_degree": 1}):
        (name,) = options
        with pytest.raises(ConfigError, match=f"{name}=.* has no effect in a model without .*leave"):
            parallelize(torch.nn.Linear(2, 2), ParallelConfig(**options), world=world_of(False))


def test_what_does_not_go_together_is_refused(two_ranks):
    two_ranks.run(refused)
