"""Experts that are modules of the user's, spread over ranks: equal to one process, under global names."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.oracle.numerics import (
    FP64_RELATIVE,
    assert_two_times,
    magnitude,
    max_error,
    relative_error,
)
from tests.support import spread_case
from tests.support.ranks import world_of
from tests.support.replicas import assert_said, messages_of
from tests.support.spread_case import D, E, SpreadCase, run_spread, run_whole
from torch import nn

from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.apply import follow_optimizer, parallelize
from expertmesh.parallel.clip import clip_grad_norm_
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Fixed


class Expert(nn.Module):
    """Another size for each, one matrix used twice, and a part of weights that not all take part in."""

    def __init__(self, index):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(index)
            self.first = nn.Linear(D, 4 + index, dtype=torch.float64)
            self.second = nn.Linear(4 + index, D, dtype=torch.float64)
            self.norm = nn.LayerNorm(D, dtype=torch.float64)
        self.again = self.first

    def forward(self, x):
        h = self.first(x)
        return self.second(torch.tanh(h) + self.again(x)) + self.norm(x)


LAYER = {"experts": Expert}


def merged(found):
    """Gradients of all ranks; a name that several have must be the same on them."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    total = {}
    for some in everyone:
        for name, grad in some.items():
            assert name not in total or relative_error(grad, total[name]) <= FP64_RELATIVE, name
            total[name] = grad
    return total


def compare_all(cases):
    for case in cases:
        world = world_of()
        spread, mine = run_spread(case)
        oracle = run_whole(case, world.size, torch.float64)
        gradients = merged(spread.gradients)
        assert gradients.keys() == oracle.gradients.keys(), case
        pairs = {n: (g, oracle.gradients[n]) for n, g in gradients.items()}
        pairs["y"] = spread.y_TD, oracle.y_TD[mine]
        pairs["dx"] = spread.x_grad_TD, oracle.x_grad_TD[mine]
        for name, (ours, theirs) in pairs.items():
            error = max_error(ours, theirs) / max(magnitude(theirs), 1.0)
            assert error <= FP64_RELATIVE, f"{case}: {name}: {error:.1e}"


def test_two_ranks(two_ranks):
    tokens = [
        (7, 4),
        (3, 0),
        (0, 0),
        (1, 0),
    ]  # with one token, most experts are not called and have no gradient
    two_ranks.run(compare_all, [SpreadCase(LAYER, tokens=t) for t in tokens])


@pytest.mark.parametrize("copies", [1, 2])
def test_four_ranks(four_ranks, copies):
    spread = {"num_replicas": copies}
    cases = [SpreadCase(LAYER, spread), SpreadCase(LAYER, spread, tokens=(0, 1, 0, 0))]
    capacity = {"capacity_factor": 0.75, "min_capacity": 1, "drop_policy": "first"}
    cases.append(SpreadCase(LAYER | capacity, spread, group=8))
    cases.append(SpreadCase(LAYER, spread | {"exchanges": partial(Fixed, bound=9)}))
    four_ranks.run(compare_all, cases)


def under_autocast():
    """Modules cast or do not cast by themselves, as in one process."""
    world, x = world_of(), spread_case._inputs(8)[0].float()
    mine = slice(4 * world.position, 4 * world.position + 4)
    outputs = []
    for dtype, spreads in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        layer = spread_case.build(SpreadCase(LAYER), dtype)
        if spreads:
            spread_experts(layer, world)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            outputs.append(layer(x[mine].to(dtype))[0])
    oracle, plain, ours = outputs
    assert ours.dtype == plain.dtype
    assert_two_times(ours, plain, oracle, what="y")


def nothing(index):
    return nn.Identity()


def half_of_nothing(index):
    return nn.Linear(D, D) if index < E // 2 else nn.Identity()


def test_copies_of_modules_without_parameters(four_ranks):
    four_ranks.run(compare_all, [SpreadCase({"experts": nothing}, {"num_replicas": 2})])


def test_autocast(two_ranks):
    two_ranks.run(under_autocast)


class Model(nn.Module):
    def __init__(self, **layer):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(D, D, dtype=torch.float64)
        options = {"num_experts": E, "top_k": 2, "experts": Expert, "dtype": torch.float64} | layer
        self.moe = MoELayer(dim=D, hidden_dim=4, seed=1, aux_loss_weight=0.0, **options)

    def forward(self, x):
        h = self.inp(x)
        return h + self.moe(h)[0]


def train(model, batches):
    """Norms of the gradients of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    follow_optimizer(model, optimizer)
    norms = []
    for x in batches:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    return norms


def norms_and_weights(copies):
    world = World()
    draw = torch.Generator().manual_seed(4)
    # a step of one token, too: most ranks have no gradient of their experts
    sizes = [8, 8, 1, 8]
    batches = [torch.randn(n, D, dtype=torch.float64, generator=draw) for n in sizes]
    whole, spread = Model(), Model()
    parallelize(spread, ParallelConfig(dp_replicate_degree=copies), world=world)
    mine = [x.tensor_split(world.size)[world.position] for x in batches]
    pairs = zip(train(spread, mine), train(whole, batches), strict=True)
    errors = [relative_error(ours, theirs) for ours, theirs in pairs]
    expected = dict(whole.named_parameters())
    own = [n for n, _ in spread.named_parameters() if n.startswith("moe.experts.")]
    errors += [relative_error(spread.get_parameter(n), expected[n]) for n in own]
    names = [None] * world.size
    dist.all_gather_object(names, own)
    world.close()
    return max(errors), names, [n for n in expected if n.startswith("moe.experts.")]


@pytest.mark.parametrize("copies", [1, 2])
def test_training_steps_and_norms(four_ranks, copies):
    for error, names, every in four_ranks.run(norms_and_weights, copies):
        assert error <= FP64_RELATIVE
        assert sorted(sum(names, [])) == sorted(every * copies)


def three_steps_of_ddp():
    """Of two tokens each, so that most experts are idle; gradients are means over the ranks, as one process has
    them."""
    world = world_of()
    plain = Model()
    ddp = nn.parallel.DistributedDataParallel(Model())
    draw = torch.Generator().manual_seed(4)
    errors = []
    for _ in range(3):
        x = torch.randn(2 * world.size, D, dtype=torch.float64, generator=draw)
        for model in (plain, ddp):
            model.zero_grad()
        ddp(x.tensor_split(world.size)[world.position]).square().sum().backward()
        plain(x).square().sum().div(world.size).backward()
        pairs = zip(ddp.module.parameters(), plain.parameters(), strict=True)
        errors += [relative_error(a.grad, b.grad) for a, b in pairs]
    return max(errors)


def test_plain_data_parallel(two_ranks):
    """`DistributedDataParallel` waits for the gradient of every parameter."""
    for error in two_ranks.run(three_steps_of_ddp):
        assert error <= FP64_RELATIVE


def save(folder):
    layer = Model().moe
    spread_experts(layer, world_of())
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.add_(1)
    dcp.save(layer.state_dict(), checkpoint_id=folder)


def load(folder):
    layer = Model().moe
    expected = {n: p.detach() + 1 for n, p in layer.experts.named_parameters()}
    spread_experts(layer, world_of())
    state = layer.state_dict()
    dcp.load(state, checkpoint_id=folder)
    layer.load_state_dict(state)
    return all(torch.equal(p, expected[n]) for n, p in layer.experts.named_parameters())


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_have_global_names(two_ranks, four_ranks, tmp_path):
    """Saved on two ranks, loaded on four, and in one process."""
    two_ranks.run(save, tmp_path)
    assert four_ranks.run(load, tmp_path) == [True] * 4
    layer = Model().moe
    expected = {n: p.detach() + 1 for n, p in layer.experts.named_parameters()}
    state = layer.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(state[f"experts.{n}"], t) for n, t in expected.items())


def mistakes():
    world, layer = world_of(), Model().moe
    spread_experts(layer, world)
    found = messages_of(
        lambda: spread_experts(Model(num_experts=3).moe, world),
        lambda: spread_experts(Model().moe, world, es_degree=2),
        lambda: spread_experts(Model().moe, world, route_degree=1),
        lambda: spread_experts(Model().moe, world, offload=True),
        lambda: spread_experts(Model().moe, world, replicated_experts=1),
        lambda: spread_experts(Model(experts=half_of_nothing).moe, world),
        lambda: layer(torch.zeros(1, D, dtype=torch.float64), route_degree=1),
    )
    for experts in (copy.deepcopy(layer.experts), layer.experts.to("meta")):
        assert all(p.owners.size == world.size for p in experts.parameters())
    return found


def test_mistakes(two_ranks):
    for messages in two_ranks.run(mistakes):
        assert_said(
            messages,
            "3 experts that are modules of your own on 2 ranks",
            "es_degree=2 with experts that are modules of your own: they cannot be sliced",
            "route_degree=1 with experts that are modules of your own: they stay where they are",
            "offload=True with experts that are modules of your own",
            "replicated_experts=1 with experts that are modules of your own: they stay where they are",
            f"experts {E // 2} to {E - 1} have no parameter, and are all that one rank would have",
            "route_degree=1 with experts that are modules of your own: they stay where they are",
        )
