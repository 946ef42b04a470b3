"""Main gradients of spread experts: summed in FP32 over micro-batches and ranks, equal to one process."""

import itertools

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, assert_two_times, relative_error
from tests.support import spread_case
from tests.support.ranks import world_of
from tests.support.replicas import whole
from tests.support.spread_case import SpreadCase, build

from expertmesh.ops.experts.weights import WeightGradients
from expertmesh.parallel.experts.dispatcher import spread_experts

MICRO_BATCHES = 3
NAMES = ("w_in", "w_out", "b_in", "b_out")


def summed(layer, inputs, dtype):
    """Main gradients after some micro-batches; those of autograd in their place where there are none."""
    for x, cotangent in inputs:
        (layer(x.to(dtype))[0] * cotangent.to(dtype)).sum().backward()
    main = layer.experts.main_grads
    if main is None:
        return {n: getattr(layer.experts, n).grad for n in NAMES}
    assert all(p.grad is None for p in layer.experts.parameters())
    return {n: whole(getattr(main, n)) for n in NAMES}


def compare(spread, dtype, enabled_first):
    world = world_of()
    case = SpreadCase({"bias": True, "activation": "gelu", "aux_loss_weight": 0.0})
    tokens = [4 * world.size] * MICRO_BATCHES
    batches = [b.split(tokens) for b in spread_case._inputs(sum(tokens))]
    batches = list(zip(*batches, strict=True))
    mine = slice(4 * world.position, 4 * world.position + 4)
    layer = build(case, dtype)
    if enabled_first:
        layer.experts.accumulate_main_grads()
    spread_experts(layer, world, **spread)
    layer.experts.accumulate_main_grads()
    found = summed(layer, [(x[mine], c[mine]) for x, c in batches], dtype)
    assert isinstance(layer.experts.main_grads, WeightGradients)
    oracle = summed(build(case, torch.float64), batches, torch.float64)
    plain = build(case, dtype)
    plain.experts.accumulate_main_grads()
    same = summed(plain, batches, dtype)
    for name in NAMES:
        if dtype == torch.float64:
            assert relative_error(found[name], oracle[name]) <= FP64_RELATIVE, (name, spread)
        else:
            assert found[name].dtype == torch.float32
            assert_two_times(found[name], same[name], oracle[name], what=f"{name} {spread}")
    layer.experts.zero_main_grads()
    assert not any(whole(getattr(layer.experts.main_grads, n)).any() for n in NAMES)


def compare_all(cases, dtype):
    for number, spread in enumerate(cases):
        compare(spread, dtype, enabled_first=number % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_to_one_process(four_ranks, dtype):
    plans = itertools.product((1, 2, 4), (1, 2), (1, 2))
    spreads = [{"route_degree": r, "es_degree": s, "num_replicas": c} for r, s, c in plans if r * c <= 4]
    four_ranks.run(compare_all, spreads, dtype)


def direct_and_step():
    """Pure expert parallelism adds to the shards' own buffers; the optimizer takes them over."""
    layer = build(SpreadCase(), torch.float32)
    spread_experts(layer, world_of())
    layer.experts.accumulate_main_grads()
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=1.0)
    before = layer.experts.w_in.full_tensor().clone()
    layer(torch.ones(3, spread_case.D))[0].sum().backward()
    main = layer.experts.main_grads
    layer.experts.w_in.grad, layer.experts.w_out.grad = main.w_in, main.w_out
    optimizer.step()
    return torch.equal(layer.experts.w_in.full_tensor(), before - main.w_in.full_tensor())


def test_an_optimizer_takes_them(two_ranks):
    assert two_ranks.run(direct_and_step) == [True, True]
