"""Mixed precision of gathered experts: BF16 weights travel, FP32 gradients come back, and nothing is rounded twice."""

import copy
import itertools

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support import spread_case
from tests.support.ranks import world_of
from tests.support.replicas import whole
from tests.support.spread_case import D, E, F, SpreadCase, build

from expertmesh.parallel.experts.dispatcher import spread_experts

PARAMETERS = E * F * D * 3
TOKENS = 6


def run(layer, x, cotangent, dtype):
    """Output, gradient of x, and gradients of the experts under autocast."""
    x = x.to(layer.experts.w_in.dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y, _ = layer(x)
    (y * cotangent.to(y)).sum().backward()
    grads = {n: whole(p.grad) for n, p in layer.experts.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad} | grads


def run_by_slices(layer, num_slices, x, cotangent, dtype):
    """The same with the experts' hidden size in slices whose rounded results are added up, as slices of any rank
    are."""
    if num_slices == 1:
        return run(layer, x, cotangent, dtype)
    found = []
    for j in range(num_slices):
        part = copy.deepcopy(layer)
        for name in ("w_in", "w_out"):
            whole_weight = getattr(layer.experts, name)
            mine = whole_weight.detach().chunk(num_slices, 2)[j].clone()
            requires_grad = whole_weight.requires_grad
            setattr(part.experts, name, torch.nn.Parameter(mine, requires_grad=requires_grad))
        found.append(run(part, x, cotangent, dtype))
    return {
        name: torch.cat([part[name] for part in found], 2)
        if name.startswith("w_")
        else sum(part[name].double() for part in found).to(first.dtype)
        for name, first in found[0].items()
    }


def compare(spread, masters, autocast, frozen):
    """Two-times rule against one process of the same precisions and slices; bytes of weights, and of gradients."""
    world = world_of()
    # one choice, as ties may fall elsewhere
    case = SpreadCase({"top_k": 1, "aux_loss_weight": 0.0})
    x, cotangent = spread_case._inputs(TOKENS * world.size)
    mine = slice(TOKENS * world.position, TOKENS * (world.position + 1))
    results = []
    for dtype, cast in ((torch.float64, None), (masters, autocast)):
        layer = build(case, dtype)
        getattr(layer.experts, frozen or "w_in").requires_grad_(frozen is None)
        slices = 1 if cast is None and dtype == torch.float64 else spread["es_degree"]
        results.append(run_by_slices(layer, slices, x, cotangent, cast))
    oracle, plain = results
    layer = build(case, masters)
    getattr(layer.experts, frozen or "w_in").requires_grad_(frozen is None)
    spread_experts(layer, world, **spread)
    with world.traffic.logged() as log:
        ours = run(layer, x[mine], cotangent[mine], autocast)
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        rows = mine if name in ("y", "dx") else slice(None)
        assert tensor.dtype == plain[name].dtype, name
        what = f"{name}: {spread}, {masters}, {autocast}"
        assert_two_times(tensor, plain[name][rows], oracle[name][rows], what=what)
    gathered = log.num_bytes(collective="all_gather", where="weights")
    reduced = log.num_bytes(collective="reduce_scatter", where="weight gradients")
    return gathered, reduced


def compare_all(cases):
    return [compare(*case) for case in cases]


SPREADS = [
    {"route_degree": r, "es_degree": f, "keep": keep, "offload": offload}
    for r, f, keep, offload in (
        (1, 1, "regather", False),
        (1, 2, "until_backward", False),
        (2, 2, "regather", True),
        (4, 1, "until_backward", True),
    )
]


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_bf16_weights_travel_and_fp32_gradients_return(four_ranks, masters):
    """With FP32 masters under autocast, and with parameters that are BF16 themselves."""
    autocast = torch.bfloat16 if masters == torch.float32 else None
    cases = [(spread, masters, autocast, None) for spread in SPREADS]
    for found in four_ranks.run(compare_all, cases):
        for (spread, *_), (gathered, reduced) in zip(cases, found, strict=True):
            gathers = 2 if spread["keep"] == "regather" else 1
            shards = 4 // spread["route_degree"] - 1
            assert gathered == gathers * shards * PARAMETERS // 4 * torch.bfloat16.itemsize
            assert reduced == shards * PARAMETERS // 4 * torch.float32.itemsize


def test_frozen_parts(four_ranks):
    """Of a frozen parameter the weights travel, but no gradient."""
    names = ("w_in", "w_out")
    cases = [
        (spread, masters, cast, name)
        for (spread, name), (masters, cast) in zip(
            itertools.product(SPREADS[:2], names),
            itertools.cycle([(torch.float32, torch.bfloat16), (torch.float32, None)]),
            strict=False,
        )
    ]
    share = {"w_in": 1, "w_out": 2}  # of three parts, what is not frozen
    for found in four_ranks.run(compare_all, cases):
        for (_, _, _, frozen), (_, reduced) in zip(cases, found, strict=True):
            expected = share[frozen] * PARAMETERS // 3 // 4 * 3 * torch.float32.itemsize
            assert reduced == expected
