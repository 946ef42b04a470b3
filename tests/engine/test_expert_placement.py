"""Experts with copies, and on the move between ranks: the same answers, and no rank much more to do than the others."""

import copy

import pytest
import torch
from tests.engine.test_engine import PROMPTS, gpt
from tests.engine.test_ranks import DRAWN, PARAMS, assert_said, differences
from tests.support.replicas import fill_biases, messages_of

from expertmesh.costs.eplb import in_order
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer


def eplb(copies, every=2):
    return {
        "enable_eplb": True,
        "num_redundant_experts": copies,
        "eplb_step_interval": every,
    }


def compared(cases):
    """Of each case, how a rank's answers differ from those of one process, and what became of its placements."""
    found = []
    for model_options, dtype, params, parallel, options, of_engine in cases:
        model = gpt(getattr(torch, dtype), **model_options)
        fill_biases(model)
        whole = copy.deepcopy(model)
        engine = Engine(model, parallel=parallel, compile=False, **options, **of_engine)
        if not engine.leads:
            engine.follow()
            continue
        here = engine.generate(PROMPTS, params)
        counts = engine.expert_placement()
        engine.close()
        alone = Engine(whole, compile=False, **options)
        far = differences(here, alone.generate(PROMPTS, params))
        found.append((*far, counts))
    return found


SHARES = {
    2: [({}, 0), ({}, 2), ({"es_degree": 1}, 4)],
    4: [
        ({}, 4),
        ({"tp_degree": 2}, 4),
        ({"tp_degree": 2, "ep_degree": 2}, 2),
        ({"tp_degree": 2, "ep_degree": 2, "es_degree": 1}, 2),
        ({"ep_degree": 2, "es_degree": 2}, 2),
    ],
}
BIASED = {"moe": {"bias": True, "num_shared_experts": 1}}
CACHE = {"block_size": 4, "num_blocks": 30, "token_budget": 16}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_same_tokens_with_copies_and_while_experts_move(num_ranks, two_ranks, four_ranks):
    cases = [
        (model, "float64", params, parallel, CACHE, eplb(copies))
        for parallel, copies in SHARES[num_ranks]
        for model, params in (({}, PARAMS), (BIASED, DRAWN))
    ]
    found, *_ = {2: two_ranks, 4: four_ranks}[num_ranks].run(compared, cases)
    for case, (same, far, counts) in zip(cases, found, strict=True):
        assert same and far < 1e-9, (case, far)
        assert counts.num_rebalances > 2
        assert all(a >= b for a, b in zip(counts.after, counts.before, strict=True))
    assert any(counts.num_moved for *_, counts in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_stay_with_copies_and_while_experts_move(dtype, two_ranks, four_ranks):
    options = CACHE | {"deterministic": True}
    model = {"batch_invariant": True, "moe": {"num_shared_experts": 1, "top_k": 3}}
    for pool, copies in ((two_ranks, 2), (four_ranks, 4)):
        cases = [(model, dtype, one, {}, options, eplb(copies)) for one in (PARAMS, DRAWN)]
        found, *_ = pool.run(compared, cases)
        assert [one[:2] for one in found] == [(True, 0.0)] * 2
        assert all(counts.num_rebalances > 2 for *_, counts in found)


def rows_of_a_rank():
    """Rows that this rank computes for the same prompts, before experts have been placed by load, and after; and the
    placements."""
    model = gpt(torch.float64, moe={"num_experts": (8,), "top_k": 2}, num_layers=1)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    with torch.no_grad():  # chosen as by Zipf: each expert half as likely as the one before
        for layer in layers:
            layer.router.proj.weight.mul_(0.05)
            layer.router.proj.weight[:3] += 0.4 * layer.router.proj.weight[:1].sign()
    engine = Engine(model, parallel={}, compile=False, prefix_caching=False, **eplb(8, every=9))
    counts = [0]

    def count(module, args):
        counts[-1] += int((args[1] < module.num_experts).sum())

    for layer in layers:
        layer.experts.register_forward_pre_hook(count)
    if not engine.leads:
        # both halves are 9 steps, of which the other ranks see as many calls
        calls = [0]

        def note(module, args):
            calls[0] += 1
            if calls[0] == 10:
                counts.append(0)

        layers[0].register_forward_pre_hook(note)
        engine.follow()
        return counts, None
    params = SamplingParams(temperature=0, max_tokens=9)
    engine.generate(PROMPTS, params)
    counts.append(0)
    engine.generate(PROMPTS, params)
    told = engine.expert_placement()
    placed = engine._runner.placed.placements
    engine.close()
    return counts, (told, placed)


def test_the_fullest_rank_has_less_to_do(four_ranks):
    found = four_ranks.run(rows_of_a_rank)
    first, second = zip(*(counts for counts, _ in found), strict=True)
    told, placements = found[0][1]
    assert sum(first) == sum(second)  # the same choices
    assert max(second) < max(first)
    assert told.num_rebalances == 1 and told.after[0] > told.before[0]
    assert placements[0].num_experts == 8 and len(placements[0].experts) == 16
    assert placements[0] != in_order(8, 4)


def mistakes():
    def engine(parallel, **given):
        return lambda: Engine(gpt(torch.float32), parallel=parallel, **given)

    return messages_of(
        engine({}, **eplb(1)),
        engine({}, **eplb(6)),
        engine({"es_degree": 2}, **eplb(2)),
        engine({"tp_degree": 2, "ep_degree": 1, "es_degree": 1}, **eplb(0)),
    )


def test_mistakes_are_named(two_ranks):
    expected = (
        (
            "num_redundant_experts=1: the 4 experts and their copies must fill equal slots of 2 parts, each part one "
            "copy at most; use 2"
        ),
        (
            "num_redundant_experts=6: the 4 experts and their copies must fill equal slots of 2 parts, each part one "
            "copy at most; use 4"
        ),
        "enable_eplb=True: has no effect where each rank has all experts",
        "enable_eplb=True: has no effect where each rank has all experts",
    )
    assert_said(two_ranks.run(mistakes), expected)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"num_redundant_experts": 2},
            "num_redundant_experts=2: has no effect without enable_eplb",
        ),
        ({"eplb_step_interval": 5}, "eplb_step_interval=5: has no effect without enable_eplb"),
        ({"enable_eplb": True}, "enable_eplb=True: is about several processes, and this is one"),
        (eplb(2, every=0), "eplb_step_interval=0"),
    ],
)
def test_one_process_has_nothing_to_place(options, line):
    with pytest.raises(ConfigError, match=line):
        Engine(gpt(torch.float32), **options)
    assert Engine(gpt(torch.float32)).expert_placement() is None
