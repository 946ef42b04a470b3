"""Weights are gathered one layer ahead, forward and backward, without a byte more and without a rank going astray."""

import random
from unittest.mock import patch

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error
from tests.support.ranks import world_of
from tests.support.replicas import whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.gather import Gather
from expertmesh.parallel.experts.prefetch import Prefetcher

D, F, E, LAYERS = 8, 12, 8, 3
PARAMETERS = E * F * D * 3
ELEMENT = 8


class Stack(nn.Module):
    """Three layers, one after the other, each with a plan of its own per call."""

    def __init__(self):
        super().__init__()
        options = {"num_experts": E, "top_k": 2, "aux_loss_weight": 0.0, "dtype": torch.float64}
        self.layers = nn.ModuleList(
            MoELayer(dim=D, hidden_dim=F, seed=n, layer_index=n, **options) for n in range(LAYERS)
        )

    def forward(self, x, routes=(None,) * LAYERS, skip=None, recompute=None):
        for n, (layer, route) in enumerate(zip(self.layers, routes, strict=True)):
            if n == skip:
                continue

            def run(x, layer=layer, route=route):
                return layer(x, route_degree=route)[0]

            y = run(x) if recompute is None else checkpoint(run, x, use_reentrant=recompute)
            x = x + y
        return x


def spread_stack(**options):
    model, prefetcher = Stack(), Prefetcher()
    for layer in model.layers:
        spread_experts(layer, world_of(), prefetcher=prefetcher, **options)
    return model, prefetcher


def events_of(keep, offload):
    """What happens in the second forward and backward, in order, and the most that is held ahead."""
    model, prefetcher = spread_stack(route_degree=1, keep=keep, offload=offload)
    events, held = [], []
    start = Gather.__init__
    number = {id(layer.experts): n for n, layer in enumerate(model.layers)}

    def starting(self, source, layout, dtype):
        start(self, source, layout, dtype)
        events.append(f"gather {number[id(source.experts)]}")

    def computing(experts, _):
        events.append(f"experts {number[id(experts)]}")
        held.append(prefetcher.num_held)

    def computed(experts, _, y):
        y.register_hook(lambda _: events.append(f"backward {number[id(experts)]}"))
        y.register_hook(lambda _: held.append(prefetcher.num_held))

    x = torch.ones(4, D, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward()
    for layer in model.layers:
        layer.experts.register_forward_pre_hook(computing)
        layer.experts.register_forward_hook(computed)
    with patch.object(Gather, "__init__", starting):
        model(x).sum().backward()
    return events, max(held), prefetcher.num_held


FORWARD = ["gather 0", "gather 1", "experts 0", "gather 2", "experts 1", "experts 2"]


@pytest.mark.parametrize("offload", [False, True])
def test_gathers_start_one_layer_ahead(two_ranks, offload):
    """Of the next layer before the experts run; of the layer before, before the experts' backward runs."""
    backward = ["backward 2", "gather 2", "gather 1", "backward 1", "gather 0", "backward 0"]
    for events, most, left in two_ranks.run(events_of, "regather", offload):
        assert events == FORWARD + backward
        assert most <= 2
        assert left == 0
    for events, most, left in two_ranks.run(events_of, "until_backward", offload):
        assert events == FORWARD + ["backward 2", "backward 1", "backward 0"]
        assert (most, left) == (1, 0)


def expected_bytes(routes, num_gathers, num_ranks):
    """Of weights and their gradients, as the formula says."""
    shards = sum(num_ranks // (route or num_ranks) - 1 for route in routes)
    return (num_gathers + 1) * shards * (PARAMETERS // num_ranks) * ELEMENT


def steps(keep, all_routes, options, spread):
    """Steps with other plans; the largest error against one process, and bytes of weights moved and expected."""
    world = world_of()
    whole, (model, prefetcher) = Stack(), spread_stack(keep=keep, **spread)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (whole, model)]
    draw = torch.Generator().manual_seed(5)
    errors, moved, expected = [], 0, 0
    gathers = 2 if keep == "regather" or options.get("recompute") is not None else 1
    for number, routes in enumerate(all_routes):
        x = torch.randn(world.size * 4, D, dtype=torch.float64, generator=draw)
        mine = slice(4 * world.position, 4 * world.position + 4)
        given = options | ({"skip": 1} if options.get("skip") == "sometimes" and number % 3 == 1 else {})
        given = {name: value for name, value in given.items() if value != "sometimes"}
        # leaves, because checkpoints with re-entrance want an input with a gradient
        x, part = x.requires_grad_(), x[mine].detach().requires_grad_()
        y = whole(x, **given)
        y.square().sum().backward()
        with world.traffic.logged() as log:
            if number % 2:
                with torch.no_grad():  # an evaluation between
                    model(part, routes, **(given | {"recompute": None}))
            z = model(part, routes, **given)
            z.square().sum().backward()
        weights = [t.num_bytes for t in log.transfers if "weight" in t.where]
        moved += sum(weights)
        expected += expected_bytes(routes, gathers + number % 2, world.size)
        errors.append(relative_error(z, y[mine]))
        errors.append(relative_error(part.grad, x.grad[mine]))
        for parameter in (p for n, p in model.named_parameters() if ".experts." not in n):
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert prefetcher.num_held <= 1
    for name, parameter in whole.named_parameters():
        other = model.get_parameter(name)
        other = other.full_tensor() if hasattr(other, "full_tensor") else other
        errors.append(relative_error(other, parameter))
    return max(errors), moved, expected


KEEPS = ("until_backward", "regather")
SAME = [(1, 1, 1)] * 2
BY_STEP = [(r,) * LAYERS for r in (1, 4, 2)]
BY_LAYER = [(1, 2, 4)] * 2


@pytest.mark.parametrize(
    ("keep", "recompute"),
    [
        ("until_backward", None),
        ("until_backward", False),
        ("regather", None),
        ("regather", False),
        ("regather", True),
    ],
    ids=["plain", "plain-checkpoint", "regather", "regather-checkpoint", "regather-reentrant"],
)
def test_not_a_byte_more(four_ranks, keep, recompute):
    """Plans that stay, that change on each step for all layers, or differ between layers; also where forwards are
    repeated."""
    for routes in (SAME, BY_STEP, BY_LAYER):
        for error, moved, expected in four_ranks.run(steps, keep, routes, {"recompute": recompute}, {"es_degree": 2}):
            assert error <= FP64_RELATIVE
            assert moved == expected


@pytest.mark.parametrize("keep", KEEPS)
def test_wrong_guesses_and_skipped_layers(four_ranks, keep):
    """Results are right, and no rank waits for another, whatever is drawn; a guess in vain is not repeated at once."""
    draw = random.Random(3)
    drawn = [tuple(draw.choice((1, 2, 4)) for _ in range(LAYERS)) for _ in range(8)]
    for error, moved, expected in four_ranks.run(steps, keep, drawn, {}, {"offload": True}):
        assert error <= FP64_RELATIVE
        assert expected < moved < 1.3 * expected
    for error, _, _ in four_ranks.run(steps, keep, SAME * 3, {"skip": "sometimes"}, {}):
        assert error <= FP64_RELATIVE


def frozen(keep):
    """Bytes of weights with frozen experts: gathered, but no gradient comes back; and the gradient of x is right."""
    world, whole, (model, prefetcher) = world_of(), Stack(), spread_stack(keep=keep)
    for stack in (whole, model):
        for layer in stack.layers:
            layer.experts.requires_grad_(False)
    x = torch.ones(2, D, dtype=torch.float64, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    whole(same).square().sum().backward()
    with world.traffic.logged() as log:
        model(x, (1,) * LAYERS).square().sum().backward()
    moved = sum(t.num_bytes for t in log.transfers if "weight" in t.where)
    assert all(p.grad is None for layer in model.layers for p in layer.experts.parameters())
    return relative_error(x.grad, same.grad), moved, prefetcher.num_held


@pytest.mark.parametrize("keep", KEEPS)
def test_frozen_experts(two_ranks, keep):
    gathers = 2 if keep == "regather" else 1
    for error, moved, held in two_ranks.run(frozen, keep):
        assert error <= FP64_RELATIVE
        assert moved == gathers * LAYERS * PARAMETERS // 2 * ELEMENT
        assert held == 0


def after_an_error(spread):
    """A backward that fails on every rank, and the step after it."""
    oracle, (model, prefetcher) = Stack(), spread_stack(keep="regather", **spread)
    x = torch.ones(2, D, dtype=torch.float64, requires_grad=True)

    def fail(_):
        raise ValueError("a hook failed")

    def failing(_, args):
        args[0].register_hook(fail)

    # below the experts of layer 1, whose weights are then on the way again, and those of layer 0 ahead
    handle = model.layers[1].experts.register_forward_pre_hook(failing)
    y = model(x)
    with pytest.raises(ValueError, match="a hook failed"):
        y.sum().backward()
    handle.remove()
    model.zero_grad()
    x.grad, same = None, x.detach().clone().requires_grad_()
    model(x).sum().backward()
    oracle(same).sum().backward()
    pairs = [(x.grad, same.grad)]
    for ours, theirs in zip(model.layers, oracle.layers, strict=True):
        pairs.append((whole(ours.experts.w_in.grad), 4 * theirs.experts.w_in.grad))
    return max(relative_error(*pair) for pair in pairs), prefetcher.num_held


@pytest.mark.parametrize("spread", [{"route_degree": 1}, {"route_degree": 2, "es_degree": 2, "overlap_degree": 2}])
def test_after_an_error_in_the_backward(four_ranks, spread):
    """Nothing is left of it, neither in the buffers where slices are joined."""
    for error, held in four_ranks.run(after_an_error, spread):
        assert error <= FP64_RELATIVE
        assert held == 0
