"""What an exchange promises: a start waits for nobody, in the forward and in the backward, and what is moved is
exact."""

from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.oracle.numerics import assert_close_fp64
from tests.support.ranks import world_of
from tests.support.spread_case import D, E, SpreadCase, build, compare

from expertmesh.moe.dispatch import Dispatched
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Alone, Fixed, Ragged

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
KINDS = {Ragged: {}, Fixed: {"exchanges": partial(Fixed, bound=4)}, Alone: {"route_degree": 1}}


def store():
    return dist.distributed_c10d._get_default_store()


def tokens_of(rank, **options):
    ids_TK = torch.tensor([[0, 7], [3, 4], [E, 5]]).roll(rank, 0)
    x_TD = torch.arange(3 * D, dtype=torch.float64).view(3, D) + 100 * rank
    return Dispatched(x_TD.requires_grad_(), ids_TK, torch.rand(3, 2, dtype=torch.float64).requires_grad_())


def a_start_beside_a_sleeper(kind, tag):
    """Rank 1 comes only after rank 0 has started: a start that waited for it would never return."""
    world, rank = world_of(False), dist.get_rank()
    layer = build(SpreadCase(), torch.float64)
    exchange = spread_experts(layer, world, **KINDS[kind]).exchange()
    assert type(exchange) is kind

    def rank_0_first(name, start):
        if rank == 1:
            store().wait([f"{tag} {name}"], timedelta(seconds=60))
        started = start()
        if rank == 0:
            store().set(f"{tag} {name}", "started")
        return started

    tokens = tokens_of(rank)
    dispatch_handle = rank_0_first("out", lambda: exchange.start(tokens))
    arrived = dispatch_handle.finish()
    y_RD = torch.where(arrived.expert_ids_TK < E, arrived.weights_TK, 0).sum(1, True) * arrived.x_TD
    combine_handle = rank_0_first("home", lambda: dispatch_handle.start_home(y_RD))
    y_TD = combine_handle.finish()
    live_TK = torch.where(tokens.expert_ids_TK < E, tokens.weights_TK, 0)
    assert_close_fp64(y_TD, live_TK.sum(1, True) * tokens.x_TD, what="y")


@pytest.mark.parametrize("kind", list(KINDS), ids=lambda kind: kind.__name__)
def test_a_start_waits_for_nobody(two_ranks, kind):
    two_ranks.run(a_start_beside_a_sleeper, kind, kind.__name__)


def the_exchange_of_the_docs():
    section = PAGE.read_text().partition("## An exchange")[2]
    names = {}
    exec(section.partition("```python")[2].partition("```")[0], names)
    compare(SpreadCase(spread={"exchanges": names["Everywhere"]}, tokens=(5, 5)))


def test_the_exchange_of_the_docs_on_two_ranks(two_ranks):
    two_ranks.run(the_exchange_of_the_docs)


class Noted(torch.autograd.Function):
    """Says when its backward runs."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


def work_between_start_and_finish(tag):
    """In the backward rank 0 sends its gradient before it turns to what ran beside the tokens, for which rank 1
    waits."""
    world, rank = world_of(False), dist.get_rank()
    exchange = spread_experts(build(SpreadCase(), torch.float64), world).exchange()
    tokens = tokens_of(rank)
    dispatch_handle = exchange.start(tokens)
    dispatch_handle.advance()

    def beside():
        if rank == 0:
            store().set(f"{tag} beside", "computed")

    def before():
        if rank == 1:
            store().wait([f"{tag} beside"], timedelta(seconds=60))

    extra_TD = Noted.apply(tokens.x_TD, beside)
    arrived = dispatch_handle.finish()
    y_TD = dispatch_handle.start_home(Noted.apply(arrived.x_TD, before)).finish() + extra_TD
    y_TD.sum().backward()
    num_copies_T = (tokens.expert_ids_TK < E).sum(1)  # all choices of a token are of different ranks
    assert torch.equal(tokens.x_TD.grad, (num_copies_T + 1.0)[:, None].expand(-1, D))


def test_what_runs_beside_tokens_runs_beside_gradients_too(two_ranks):
    two_ranks.run(work_between_start_and_finish, "beside")


# ---- parts

SPREADS = [{"es_degree": 2}, {"route_degree": 2}, {"exchanges": partial(Fixed, bound=9)}]
TOKENS = [(7, 4, 0, 9), (0, 0, 0, 0), (1, 0, 2, 0)]


def by_turns(number):
    """Each way of spreading beside one of the numbers of tokens, other ones for the next number of parts."""
    return [(spread, TOKENS[(number + i) % len(TOKENS)]) for i, spread in enumerate(SPREADS)]


def bytes_in_parts(degrees, is_whole):
    """Every number of parts is exact; returns the bytes of tokens, and the exchanges of counts, of each."""
    found = []
    for number, degree in enumerate(degrees):
        for spread, tokens in product(SPREADS, TOKENS) if is_whole else by_turns(number):
            dense = {"num_shared_experts": 1, "residual": True}
            compare(SpreadCase(dense, spread | {"overlap_degree": degree}, tokens=tokens))
        log = compare(SpreadCase(spread={"overlap_degree": degree}))
        counts = [transfer for transfer in log if transfer.where.endswith("counts")]
        rows = [t for t in log if "dispatch" in t.where or "combine" in t.where]
        found.append((sum(t.num_bytes for t in rows if t not in counts), len(counts)))
    return found


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_parts_are_exact_and_move_the_same_bytes(four_ranks, is_whole):
    for of_one, *others in four_ranks.run(bytes_in_parts, (1, 2, 4, 8), is_whole):
        assert of_one[0] > 0
        assert others == [of_one] * 3
        assert of_one[1] == 1, "one exchange of counts for all parts"


def test_parts_add_weight_gradients_exactly(four_ranks):
    four_ranks.run(compare, SpreadCase(dtype=torch.bfloat16, spread={"overlap_degree": 4}))


class Order:
    """Notes what an exchange of two ranks does, and in which order."""

    def __init__(self, exchange):
        self.notes, start_parts = [], exchange.start_parts

        def noted(tokens, num_parts, num_chunks):
            dispatch_handles = start_parts(tokens, num_parts, num_chunks)
            for i, dispatch_handle in enumerate(dispatch_handles):
                for name in ("advance", "finish", "start_home"):
                    self.note(dispatch_handle, name, i)
            return dispatch_handles

        exchange.start_parts = noted

    def note(self, dispatch_handle, name, i):
        method = getattr(dispatch_handle, name)

        def noting(*args):
            if (name, i) not in self.notes:
                self.notes.append((name, i))
            return method(*args)

        setattr(dispatch_handle, name, noting)


def order_of_two_parts(options, call):
    layer = build(SpreadCase(), torch.float64)
    dispatcher = spread_experts(layer, world_of(False), **options)
    order = Order(dispatcher.exchange())
    layer(tokens_of(0).x_TD, **call)
    return order.notes


@pytest.mark.parametrize("where", ["layer", "call"])
def test_a_part_travels_while_experts_compute(two_ranks, where):
    """The second part is under way before the first is waited for, and the first before the second's experts run."""
    degree = {"overlap_degree": 2}
    arguments = (degree, {}) if where == "layer" else ({}, degree)
    expected = [("advance", 0), ("advance", 1), ("finish", 0), ("start_home", 0)]
    expected += [("finish", 1), ("start_home", 1)]
    assert two_ranks.run(order_of_two_parts, *arguments) == [expected] * 2
