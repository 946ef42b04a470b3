"""The oracle of `test_matrix.py` sees each mistake that people make with groups and gradients.

Each mutant puts one mistake into the collectives of every rank; the comparison with one process must then fail.
"""

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE
from tests.support.form_case import FormCase, differences, run_form
from tests.support.ranks import world_of
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.comm import collectives
from expertmesh.comm.all_to_all import flat
from expertmesh.comm.world import World
from expertmesh.ops.experts import deferred_wgrad
from expertmesh.parallel import clip, ranks, tensor
from expertmesh.parallel.experts import (
    dispatcher,
    exchange,
    hierarchical,
    replicated_experts,
    storage,
)

CLEARLY = 1e4 * FP64_RELATIVE

SPREAD = FormCase(route="middle", bias=True)
COPIES = FormCase(form="E+D", rows="unequal")
HALVES = FormCase(form="E+Z2", num_ranks=2, subgroup=True)
KEPT = FormCase(form="E+Z1", route="one", micro_batches=2)
SHARED = FormCase(form="E+D+M", rows="unequal", dense_parts=True)
PARTS = FormCase(rows="unequal", overlap=2)
NODES = FormCase(top_k=4, ranks_per_node=2)
REPLICATED = FormCase(form="E+D", rows="unequal", replicated=2, bias=True)
CASES = {"replicated": REPLICATED, "parts": PARTS, "nodes": NODES} | {
    "spread": SPREAD,
    "copies": COPIES,
    "halves": HALVES,
    "kept": KEPT,
    "shared": SHARED,
}

MUTANTS = {}


def mutant(case):
    """Registers a function that returns what to replace: (object, attribute, replacement), ..."""

    def register(function):
        MUTANTS[function.__name__] = case, function
        return function

    return register


def world_group(group):
    """All processes of the pool instead of the group."""
    return world_of().all_ranks()


def other_half(group):
    """A group of as many ranks as this one, with another partition of the four."""
    cells = [[0, 1], [2, 3]] if group.ranks not in ((0, 1), (2, 3)) else [[0, 2], [1, 3]]
    return world_of().group(cells, name="another")


def is_backward(where):
    return where.endswith("backward")


def tokens_return_over(choose, is_wrong=is_backward):
    """The gradient of an all-to-all goes over another group; rows that do not fit there are cut or zero."""
    start = flat.start_all_to_all

    def mistaken(x_RD, send, receive, group, *, where):
        if not is_wrong(where):
            return start(x_RD, send, receive, group, where=where)
        wrong = choose(group)
        counts = torch.zeros(wrong.size, 1, dtype=torch.int64)
        counts[: len(send), 0] = torch.tensor(send)
        (real,) = flat.AsyncCounts(counts, wrong, where=where).finish()
        out, pending = start(x_RD, real.send, real.receive, wrong, where=where)
        if pending is not None:
            pending.wait()
        out = nn.functional.pad(out, (0, 0, 0, max(sum(receive) - len(out), 0)))
        return out[: sum(receive)], None

    return [(flat, "start_all_to_all", mistaken)]


@mutant("spread")
def tokens_do_not_return():
    start = flat.start_all_to_all

    def mistaken(x_RD, send, receive, group, *, where):
        if where.endswith("backward"):
            return x_RD.new_zeros(sum(receive), *x_RD.shape[1:]), None
        return start(x_RD, send, receive, group, where=where)

    return [(flat, "start_all_to_all", mistaken)]


@mutant("nodes")
def a_sum_of_a_node_counted_twice():
    combine = hierarchical.combine

    def mistaken(y_RD, metadata, slots):
        twice = torch.cat((2 * y_RD[:1], y_RD[1:]))
        return combine(twice, metadata, slots)

    return [(hierarchical, "combine", mistaken)]


@mutant("parts")
def a_part_of_the_sums_counted_twice():
    combine = exchange.combine

    def mistaken(y_RD, metadata, slots):
        y_TD = combine(y_RD, metadata, slots)
        return torch.cat((2 * y_TD[:1], y_TD[1:]))

    return [(exchange, "combine", mistaken)]


@mutant("replicated")
def gradients_of_hot_experts_are_those_of_one_copy():
    start = replicated_experts.start_all_reduce

    def mistaken(x, group, *, where):
        if "gradients of hot" in where:
            group = world_of().group([[0, 1], [2, 3]], name="a copy")
        return start(x, group, where=where)

    return [(replicated_experts, "start_all_reduce", mistaken)]


def everywhere(function, replacement):
    """A function replaced in every module that imported it."""
    name, modules = function.__name__, [m for m in sys.modules.values() if m is not None]
    ours = [m for m in modules if m.__name__.startswith("expertmesh.")]
    return [(m, name, replacement) for m in ours if vars(m).get(name) is function]


def keeps_own_block(purpose):
    """Reduce-scatters of a purpose do not sum."""
    start = collectives.start_reduce_scatter

    def mistaken(x, group, *, where):
        if purpose(where):
            return x.detach()[group.rank].clone(), None
        return start(x, group, where=where)

    return everywhere(start, mistaken)


@mutant("spread")
def weight_gradients_are_summed_by_other_ranks():
    start = collectives.start_reduce_scatter

    def mistaken(x, group, *, where):
        return start(x, other_half(group) if "gradients" in where else group, where=where)

    return everywhere(start, mistaken)


def gradients_of_copies_over(choose):
    start = collectives.start_all_reduce

    def mistaken(x, group, *, where):
        if "gradients" not in where:
            return start(x, group, where=where)
        other = choose(group)
        return None if other is None else start(x, other, where=where)

    return everywhere(start, mistaken)


@mutant("spread")
def statistics_have_a_local_gradient():
    start = collectives.start_all_reduce

    def mistaken(x, group, *, where):
        return None if where.endswith("statistics, backward") else start(x, group, where=where)

    return [(collectives, "start_all_reduce", mistaken)]


@mutant("halves")
def statistics_are_those_of_the_world():
    def mistaken(self, value):
        return collectives.all_reduce(value, world_group(None), where="statistics")

    return [(dispatcher.ExpertDispatcher, "sum_over_processes", mistaken)]


@mutant("copies")
def statistics_are_those_of_one_copy():
    def mistaken(self, value):
        return collectives.all_reduce(value, self.exchange().route.group, where="statistics")

    return [(dispatcher.ExpertDispatcher, "sum_over_processes", mistaken)]


@mutant("spread")
def dense_gradients_are_means():
    def nothing(self, *args):
        return None

    return [
        (FSDPModule, "set_gradient_divide_factor", nothing),
        (FSDPModule, "set_force_sum_reduction_for_comms", nothing),
    ]


@mutant("copies")
def dense_gradients_of_copies_are_not_summed():
    def mistaken(self, *args):
        self.set_requires_all_reduce(False)

    return [(FSDPModule, "set_force_sum_reduction_for_comms", mistaken)]


@mutant("kept")
def dense_gradients_are_never_summed():
    def mistaken(self, model, *, is_last):
        model.set_requires_gradient_sync(False)

    return [(ranks.Ranks, "announce_micro_batch", mistaken)]


@mutant("kept")
def weights_are_kept_over_a_step():
    def mistaken(self, optimizer):
        self._is_following = True

    return [(storage.ExpertStorage, "follow", mistaken)]


@mutant("copies")
def norm_counts_copies():
    def mistaken(*parameter_and_gradient):
        mesh = parameter_and_gradient[-1].device_mesh
        return tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)

    return [(clip, "_cut_along", mistaken)]


@mutant("halves")
def norm_over_the_world():
    right = clip._cut_along

    def mistaken(*parameter_and_gradient):
        groups = right(*parameter_and_gradient)
        return tuple(world_of().all_ranks().process_group for _ in groups)

    return [(clip, "_cut_along", mistaken)]


MUTANTS |= {
    "tokens_return_to_the_world": ("halves", lambda: tokens_return_over(world_group)),
    "tokens_return_to_other_ranks": ("spread", lambda: tokens_return_over(other_half)),
    "sums_of_a_node_are_taken_over_other_ranks": (
        "nodes",
        lambda: tokens_return_over(other_half, lambda where: where.endswith("combine inside a node")),
    ),
    "hot_experts_are_computed_twice": (
        "replicated",
        lambda: [(dispatcher, "without_hot", lambda tokens, hot, num_experts: tokens)],
    ),
    "late_gradients_are_forgotten": (
        "replicated",
        lambda: [(deferred_wgrad.DeferredWeightGradients, "compute", lambda self: [])],
    ),
    "weight_gradients_are_not_summed": (
        "spread",
        lambda: keeps_own_block(lambda where: "weight gradients" in where),
    ),
    "copies_are_not_summed": ("copies", lambda: gradients_of_copies_over(lambda group: None)),
    "copies_are_summed_over_the_world": ("copies", lambda: gradients_of_copies_over(world_group)),
    "slices_of_attention_are_not_summed": (
        "shared",
        lambda: keeps_own_block(lambda where: where.endswith("attention")),
    ),
    "gradients_of_shared_tokens_are_not_summed": (
        "shared",
        lambda: keeps_own_block(lambda where: where.endswith("feed-forward, backward")),
    ),
    "gradients_of_stored_tables_are_not_summed": (
        "shared",
        lambda: keeps_own_block(lambda where: where.endswith("stored parameters, backward")),
    ),
    "gradients_of_whole_parameters_are_local": (
        "shared",
        lambda: [(tensor, "_local_view", lambda parameter: parameter.to_local())],
    ),
    "norm_of_own_shards": (
        "spread",
        lambda: [(clip, "_cut_along", lambda *parameter_and_gradient: ())],
    ),
    "parts_in_another_order": (
        "parts",
        lambda split=exchange.split: [(exchange, "split", lambda *given: split(*given)[::-1])],
    ),
}


def run_mutant(name, case):
    """One case on this rank with a mistake; what the oracle compares."""
    assert isinstance(world_of(case.subgroup), World)  # made before the mistake
    with ExitStack() as stack:
        for place, attribute, replacement in MUTANTS[name][1]():
            stack.enter_context(mock.patch.object(place, attribute, replacement))
        return run_form(case, steps=steps_of(case))


def steps_of(case):
    """What is kept over a step, and experts that the first one found hot, show in the second; all else in the first."""
    return 2 if case in (KEPT, REPLICATED) else 1


def error(results, case):
    return max(differences(case, results, steps=steps_of(case)).values())


@pytest.mark.parametrize("name", CASES)
def test_without_a_mistake_the_cases_agree(four_ranks, name):
    case = CASES[name]
    assert error(four_ranks.run(run_form, case, steps=steps_of(case)), case) <= FP64_RELATIVE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(four_ranks, name):
    case = CASES[MUTANTS[name][0]]
    assert error(four_ranks.run(run_mutant, name, case), case) > CLEARLY
