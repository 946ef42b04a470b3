"""Layers that choose how their tokens travel, by hand at random or by the tuner: the same losses as ones that do
not."""

import gc
import json
from dataclasses import asdict
from functools import partial

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error
from tests.support.ranks import world_of
from torch.utils.checkpoint import checkpoint

import expertmesh as em
from expertmesh import lora
from expertmesh.cli.bench import links, plot, run, table
from expertmesh.comm.measure import fit, measure
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.apply import parallelize
from expertmesh.parallel.experts import adaptive
from expertmesh.parallel.experts import tuning_cache as cache
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Fixed
from expertmesh.parallel.experts.load_record import Chosen, Repetitions
from expertmesh.parallel.experts.tuner import Effort
from expertmesh.parallel.ranks import Ranks

NODES = (0, 0, 1, 1)
D, T, STEPS = 8, 12, 8


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        options = {"num_experts": 8, "top_k": 3, "aux_loss_weight": 0.1, "dtype": torch.float64}
        self.first, self.second = (MoELayer(dim=D, hidden_dim=6, seed=i, layer_index=i, **options) for i in range(2))

    def forward(self, x, **way):
        y, stats = self.first(x, **way)
        z, others = self.second(x + y, **way)
        return x + y + z, stats.aux_loss + others.aux_loss


def inputs(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn((T, 1, 0, 5)[(rank + step) % 4], D, dtype=torch.float64, generator=generator)


def train(model, world, ways):
    """Losses of all ranks, one step for each way."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step, way in enumerate(ways):
        x = inputs(step, world.position).requires_grad_()
        y, aux_loss = model(x, **way)
        loss = (y.square().sum() / T + aux_loss) / world.size
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if "experts" not in name:
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return torch.tensor(losses, dtype=torch.float64)


def spread(world, **options):
    model = Layers()
    for layer in (model.first, model.second):
        spread_experts(layer, world, es_degree=1, nodes=NODES, **options)
    return model


def at_random(exchanges, *all_to_all):
    """Everything switched in each step, against nothing."""
    world, draw = world_of(), torch.Generator().manual_seed(1)

    def one_of(*values):
        return values[int(torch.randint(0, len(values), (), generator=draw))]

    ways = [
        {
            "route_degree": one_of(1, 2, 4),
            "overlap_degree": one_of(1, 2, 3, 8),
            "all_to_all": one_of(*all_to_all),
            "replicated_experts": one_of(0, 1, 3, 8),
        }
        for _ in range(STEPS)
    ]
    fixed = train(spread(world), world, [{}] * STEPS)
    return fixed, train(spread(world, exchanges=exchanges), world, ways)


@pytest.mark.parametrize("given", [(None, "flat", "hierarchical", "auto"), (partial(Fixed, bound=T), "flat")])
def test_steps_with_everything_switched_are_those_of_a_fixed_way(four_ranks, given):
    for fixed, switched in four_ranks.run(at_random, *given):
        assert fixed.unique().numel() == STEPS
        assert relative_error(switched, fixed) <= FP64_RELATIVE


def tuned(cache_dir):
    """Losses with and without, the ways of each step, and collectives of a step before and after all is settled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "user_cache_dir", lambda: cache_dir)
        patch.setattr(adaptive, "EFFORT", Effort(num_starts=3, num_ways=3))
        world = world_of()
        config = ParallelConfig(ranks_per_node=2, adaptive=True)
        results = []
        for given, steps in ((ParallelConfig(), 2), (config, 30), (config, 6)):
            model = Layers()
            parallelize(model, given, world=world)
            first = model.first.dispatcher
            ways = []
            right = first._choose

            def noted(way, tokens, right=right, ways=ways):
                ways.append(right(way, tokens))
                return ways[-1]

            first._choose = noted
            losses = []
            for _ in range(steps):
                x = inputs(0, world.position).requires_grad_()
                with world.traffic.logged() as log:
                    y, aux_loss = model(x)
                    ((y.square().sum() / T + aux_loss) / world.size).backward()
                losses.append(float(y.detach().sum()))
            statistics = log.num_bytes(where="statistics")
            results.append((torch.tensor(losses, dtype=torch.float64), ways, statistics))
        return results


def test_the_tuner_chooses_alike_on_all_ranks_and_then_costs_nothing(four_ranks, tmp_path):
    found = four_ranks.run(tuned, tmp_path)
    for (plain, _, quiet), (tried, ways, settled), (_, again, _) in found:
        assert torch.isfinite(plain).all()
        # parameters stay, so that every step has the first one's result
        error = (tried - plain[0]).abs().max()
        assert error <= FP64_RELATIVE * max(float(plain.abs().max()), 1.0)
        assert settled == quiet, "nothing more travels when the load's way is settled"
        assert ways == found[0][1][1] and again == found[0][2][1]
        assert len(set(ways)) > 2 and len(set(ways[-5:])) == 1
        assert set(again[1:]) == {ways[-1]}, "another model of the same shapes finds it on disk"
    assert len(list(tmp_path.glob("plans/cpu-2+2-*.json"))) == 1
    for known, ways in four_ranks.run(with_given_parts, tmp_path):
        assert not known, "a plan of all choices is none of those that are left"
        assert {chosen.num_parts for chosen in ways if chosen.route_degree > 1} == {2}
        assert len(set(ways)) > 1
    assert len(list(tmp_path.glob("plans/cpu-2+2-*.json"))) == 2


def kept_with_the_run(cache_dir, own):
    """What tuners know at first: without a record, after its run, and once the cache says otherwise or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "user_cache_dir", lambda: cache_dir)
        patch.setattr(adaptive, "EFFORT", Effort(num_starts=3, num_ways=3, num_trials=1))
        world, found = world_of(), []
        config = ParallelConfig(ranks_per_node=2, adaptive=True)
        for name in ("first", "first", "second"):
            model = Layers()
            parallelize(model, config, world=world, plans=own / f"{name}.json")
            tuner = model.first.dispatcher.chooser.tuner
            found.append(dict(tuner.settled))
            while not tuner.settled:
                y, aux_loss = model(inputs(0, world.position).requires_grad_())
                ((y.square().sum() / T + aux_loss) / world.size).backward()
            if len(found) == 1:
                Ranks(world).on_rank0(lambda: other_plans(cache_dir))
        return found


def other_plans(cache_dir):
    """Another run settles on other ways."""
    (path,) = (cache_dir / "plans").iterdir()
    values = json.loads(path.read_text())
    one, two = (asdict(em.DispatchOptions(degree, 1, "flat", 0)) for degree in (1, 2))
    values["plans"] = {key: two if way == one else one for key, way in values["plans"].items()}
    path.write_text(json.dumps(values))


def test_a_run_that_goes_on_takes_its_own_plans(four_ranks, tmp_path):
    """Whatever other runs have put into the user's cache; a new run begins with that, and keeps it."""
    for nothing, again, other in four_ranks.run(kept_with_the_run, tmp_path / "cache", tmp_path):
        assert nothing == {} and again.keys() == other.keys() != set()
        assert all(again[key] != other[key] for key in again)
    kept = json.loads((tmp_path / "second.json").read_text())["plans"]
    assert list(kept.values()) == [asdict(way) for way in other.values()]


def with_given_parts(cache_dir):
    """What a tuner knows at first, and the ways of each step, where the number of parts is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "user_cache_dir", lambda: cache_dir)
        patch.setattr(adaptive, "EFFORT", Effort(num_starts=3, num_ways=3, num_trials=1))
        world, model = world_of(), Layers()
        config = ParallelConfig(ranks_per_node=2, overlap_degree=2, adaptive=True)
        parallelize(model, config, world=world)
        dispatcher = model.first.dispatcher
        known, ways = dict(dispatcher.chooser.tuner.settled), []
        while not dispatcher.chooser.tuner.settled:
            x = inputs(0, world.position).requires_grad_()
            y, aux_loss = model(x)
            ((y.square().sum() / T + aux_loss) / world.size).backward()
            ways.append(dispatcher._repetitions._last)
        return known, ways


def bandwidths(nodes):
    return list(measure(world_of(), nodes, [256, 1024]))


def test_links_are_measured(four_ranks):
    uneven = four_ranks.run(bandwidths, (0, 0, 0, 1))[0]
    assert "two_step" not in {p.algorithm for p in uneven}, "its ranks would wait for others"
    found = four_ranks.run(bandwidths, NODES)
    points = found[0]
    ways = {(p.algorithm, p.link) for p in points}
    assert len(points) == 2 * len(ways) == 2 * 10 and ("two_step", "all") in ways
    assert all(p.seconds == q.seconds for p, q in zip(points, found[3], strict=True))
    network = fit(points, NODES)
    assert network.inside.bytes_per_s > 0 and network.across.latency_s > 0
    assert table(points).count("\n") == 3 and plot(points).count("<polyline") == len(ways)


def test_links_that_are_assumed_are_marked(four_ranks):
    """On one machine there is nothing to measure across."""
    alone = (0, 0, 0, 0)
    inside, across = links(fit(four_ranks.run(bandwidths, alone)[0], alone)).splitlines()
    assert inside.startswith("inside") and "assumed" not in inside
    assert across.startswith("across") and across.endswith("(assumed: these ranks have no such link to measure)")


def test_one_rank_has_no_links():
    with pytest.raises(ConfigError, match="there is one rank; start more with torchrun"):
        run(["comm"])


def repeated(first, second):
    """Two checkpointed forwards that wait for one backward, after one that does not wait any more."""
    layer = spread(world_of()).first
    x = torch.ones(2, D, dtype=torch.float64, requires_grad=True)

    def run(way):
        return checkpoint(lambda x: layer(x, **way)[0], x, use_reentrant=False).sum()

    run({"route_degree": 1}).backward()
    (run(first) + run(second)).backward()
    return x.grad


def ambiguous():
    with pytest.raises(ConfigError, match="layer 0: 2 forwards that went different ways wait"):
        repeated({"overlap_degree": 2}, {})


def test_a_forward_is_repeated_the_way_it_went(four_ranks):
    ways = {"overlap_degree": 2}, {"overlap_degree": 2}
    for one, other in zip(four_ranks.run(repeated, *ways), four_ranks.run(repeated, {}, {}), strict=True):
        assert relative_error(one, other) <= FP64_RELATIVE
    four_ranks.run(ambiguous)


def test_forwards_without_a_backward_are_forgotten():
    """They were kept for ever, each call slower than the one before, and made a later repetition ambiguous."""
    record, x = Repetitions("layer"), torch.ones(1, requires_grad=True)

    def forward(parts):
        told, y = record.note(Chosen(4, parts, True, ())), 2 * x
        told(y)
        return y.sum()

    for parts in (1, 2, 3):
        forward(parts)
    gc.collect()
    loss = forward(4)
    assert record.chosen().num_parts == 4 and len(record._waiting) == 1
    loss.backward()
    assert record.chosen().num_parts == 4, "what is repeated in its own backward"


def with_adapters():
    """Whether two layers choose their ways, of which the first has adapters that stay on their ranks."""
    model = Layers()
    lora.add(model.first, rank=2, seed=0)
    parallelize(model, ParallelConfig(adaptive=True), world=world_of())
    return [layer.dispatcher.chooser is not None for layer in (model.first, model.second)]


def test_layers_with_adapters_keep_their_way(four_ranks):
    assert four_ranks.run(with_adapters) == [[False, True]] * 4


def refused():
    layer = spread(world_of()).first
    for way, words in (
        ({"replicated_experts": 9}, "replicated_experts=9: must be from 0 to the 8 experts"),
        ({"overlap_degree": 0}, "overlap_degree=0: must be a whole number of at least 1"),
        ({"route_degree": 3}, "route_degree=3: must divide the 4 ranks"),
        (
            {"all_to_all": "fast"},
            "all_to_all=fast: must be one of flat, hierarchical, auto; did you",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            layer(torch.zeros(2, D, dtype=torch.float64), **way)


def test_ways_that_there_are_not(four_ranks):
    four_ranks.run(refused)
