"""The time of a step: the layers of experts are `layer_time`'s, and each part grows with its cause."""

from dataclasses import fields, replace

import pytest

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import RouteShape, TokenLoad, flat_copies
from expertmesh.costs.hardware import find_cluster, network_of
from expertmesh.costs.layer_time import LayerShape, Machine, step_time
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.step_time import (
    BOUNDS,
    FP8_SHARE,
    Efficiency,
    raw_step,
    route_of,
    step_seconds,
)
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import recipe

SIZES = sizes_of(recipe("gpt-1.3b-moe128").model)
H100 = find_cluster("h100x64")
LAYOUT = RankLayout(64, route_degree=64, micro_batch=4, accumulation=2)
WORK = Workload(2048)


def seconds(layout=LAYOUT, work=WORK, cluster=H100, efficiency=None):
    return step_seconds(raw_step(SIZES, layout, work, cluster), efficiency or Efficiency())


@pytest.mark.parametrize("kind", ["flat", "hierarchical"])
@pytest.mark.parametrize(("route_degree", "es_degree"), [(8, 1), (64, 1), (64, 2), (16, 4)])
@pytest.mark.parametrize("parts", [1, 4])
def test_layers_of_experts_are_those_of_the_tuner(kind, route_degree, es_degree, parts):
    """Any number of tokens takes what `layer_time.step_time` says, to rounding."""
    layout = replace(
        LAYOUT,
        route_degree=route_degree,
        es_degree=es_degree,
        overlap_degree=parts,
        all_to_all=kind,
    )
    block = next(b for b in SIZES.blocks if b.num_experts)
    found = raw_step(SIZES, layout, WORK, H100)
    shape = LayerShape(
        num_experts=128,
        dim=SIZES.dim,
        hidden_dim=block.hidden_dim,
        num_matrices=2,
        element_bytes=2,
        gradient_bytes=4,
        num_ranks=64,
    )
    machine = Machine(network_of(H100), H100.device.flops_per_s("bfloat16"), 128)
    load = TokenLoad.even(4 * 2048, 1, 128)
    route = route_of(route_degree, es_degree, 8)
    layer = step_time(DispatchOptions(route_degree, parts, kind, 0), route, shape, load, machine)
    assert found.grouped_s == pytest.approx(block.count * layer.products_s)
    travel = found.exchange_inside_s + found.exchange_across_s
    assert travel == pytest.approx(block.count * layer.travel_s)
    assert found.exchange_across_s == pytest.approx(block.count * layer.across_s)


def test_tokens_that_do_not_merge_travel_once_for_each_choice():
    route = RouteShape(4, (0, 1, 2, 3), 4, (0, 0, 1, 1))
    load = TokenLoad.even(10, 6, 8)
    merged, plain = (flat_copies(route, replace(load, merges=m)) for m in (True, False))
    assert plain.across == 2 * 10 * 6 / 2  # of 60 rows of each of two ranks half belong to the other node
    assert merged.across < plain.across


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("dense", False),
        ("grouped", False),
        ("network", False),
        ("element_bytes", True),
        ("host_s", True),
        ("hidden", False),
    ],
)
def test_each_constant_moves_the_step(name, grows):
    layout = replace(LAYOUT, overlap_degree=2)
    usual = Efficiency()
    more = replace(usual, **{name: getattr(usual, name) * 1.1})
    change = seconds(layout, efficiency=more).total_s - seconds(layout, efficiency=usual).total_s
    assert change > 0 if grows else change < 0


def test_stacks_differ_by_their_own_constants():
    by_stack = {s: seconds(work=replace(WORK, stack=s)) for s in ("eager", "graphs", "fused")}
    assert by_stack["eager"].host_s > by_stack["graphs"].host_s > by_stack["fused"].host_s > 0
    slow = replace(Efficiency(), old=0.6)
    old = replace(WORK, stack="2021")
    assert seconds(work=old, efficiency=slow).dense_s > seconds(work=old).dense_s
    assert seconds(work=WORK, efficiency=slow) == seconds(work=WORK)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"checkpointing": "full"}, "attention_s"),
        ({"checkpointing": "full"}, "exchange_across_s"),
        ({"checkpointing": "moe"}, "exchange_across_s"),
        ({"checkpointing": "experts"}, "grouped_s"),
        ({"tp_degree": 8}, "tensor_s"),
        ({"pp_degree": 4, "route_degree": 16}, "bubble_s"),
        ({"offload": True}, "optimizer_s"),
        ({"accumulation": 4}, "host_s"),
    ],
)
def test_what_costs_more_where(change, part):
    assert getattr(seconds(replace(LAYOUT, **change)), part) > getattr(seconds(), part)


def test_one_hot_dispatch_costs_tokens_over_hidden_size():
    """Encode and decode are T / F times the experts' operations, in forward and backward (docs/planner.md)."""
    raw = raw_step(SIZES, LAYOUT, replace(WORK, one_hot=True), H100)
    block = next(b for b in SIZES.blocks if b.num_experts)
    peak = H100.device.flops_per_s("bfloat16")
    tokens = 4 * 2048
    experts = block.count * 3 * 2 * tokens * block.num_matrices * SIZES.dim * block.hidden_dim / peak
    products = experts * tokens / block.hidden_dim * 2 / 3
    assert raw.one_hot_s > products
    assert raw.one_hot_s < products + experts  # masks are moved, too
    assert raw_step(SIZES, LAYOUT, WORK, H100).one_hot_s == 0


def test_fp8_is_faster_in_products_alone():
    bf16, fp8 = (raw_step(SIZES, LAYOUT, replace(WORK, precision=p), H100) for p in ("bfloat16", "float8"))
    peaks = H100.device.fp8_tflops / H100.device.bf16_tflops
    assert bf16.grouped_s / fp8.grouped_s == pytest.approx(peaks * FP8_SHARE)
    assert fp8.attention_s == bf16.attention_s
    assert fp8.host_layers == 2 * bf16.host_layers


def test_constants_are_inside_their_bounds():
    assert {f.name for f in fields(Efficiency)} == set(BOUNDS) and len(BOUNDS) <= 8
    for name, (least, most) in BOUNDS.items():
        assert least <= getattr(Efficiency(), name) <= most
