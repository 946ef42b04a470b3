"""Folders that an engine opens over ranks, experts in 8 and 4 bits and experts in slots among them, answer as on one
process."""

import itertools

import pytest
import torch
from tests.engine.test_ranks import DRAWN, PARAMS, assert_said, differences
from tests.integrations.test_quantize import make_run

import expertmesh as em
from expertmesh.errors import ConfigError, PeerError
from expertmesh.integrations.hub import quantize
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.serving import own_tensors

E, F = 4, 256
PROMPTS = [[5, 3, 9, 12], [7] * 30, [300], [11, 7]]
MODEL = {
    "model.moe.num_experts": (E,),
    "model.moe.hidden_dim": F,
    "model.moe.num_shared_experts": 1,
    "model.moe.bias": True,
    "model.init_std": 0.3,
}
FORMS = ("int8", "int4", "fp8")
SLOT, SLOTS = {"expert_slots": 1}, {"expert_slots": 2, "expert_fetch_ahead": True}
SLICED, SPLIT, BOTH = (
    {"es_degree": 2},
    {"tp_degree": 2, "es_degree": 1},
    {"ep_degree": 2, "es_degree": 2},
)
CASES = {  # whole experts of every form are below, to the bit
    2: [
        ("run", {}, SLOTS),
        ("run", SLICED, SLOT),
        ("int8", SLICED, {}),
        ("int4", SLICED, SLOT),
        ("int4", SPLIT, {}),
        ("fp8", SLICED, {}),
    ],
    4: [
        ("run", SPLIT | {"ep_degree": 2}, SLOT),
        ("int8", BOTH, {}),
        ("int4", SPLIT | {"ep_degree": 2}, {}),
        ("fp8", BOTH, SLOT),
    ],
}
EPLB = {"enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 2}
COMMON = {"device": "cpu", "compile": False, "block_size": 4, "num_blocks": 60, "token_budget": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("folders")
    make_run(found / "run", **MODEL)
    for form in FORMS:
        dtype = None if form == "int8" else torch.bfloat16
        quantize(found / "run", found / form, format=form, dtype=dtype)
    return found


def compared(cases):
    """Of each case, how answers differ from those of one process; experts that slots missed, and those moved; rank 0's
    share of bytes."""
    found = []
    for folder, params, parallel, options in cases:
        engine = em.Engine(folder, parallel=parallel, **COMMON, **options)
        if not engine.leads:
            engine.follow()
            continue
        here = engine.generate(PROMPTS, params)
        missed = [one.misses for one in engine.expert_paging()]
        placed = engine.expert_placement()
        engine.close()
        plain = {k: v for k, v in options.items() if k in ("deterministic", "dtype")}
        alone = em.Engine(folder, **COMMON, **plain)
        there = alone.generate(PROMPTS, params)
        moved = placed and placed.num_moved
        share = bytes_of_experts(engine) / bytes_of_experts(alone)
        found.append((*differences(here, there), missed, moved, share))
    return found


def bytes_of_experts(engine):
    layers = [m for m in engine.model.modules() if isinstance(m, MoELayer)]
    return sum(t.nbytes for layer in layers for _, t in own_tensors(layer.experts))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_same_tokens_as_one_process(place, num_ranks, two_ranks, four_ranks):
    cases = [
        (place / name, params, parallel, {"dtype": "float64", **slots})
        for (name, parallel, slots), params in zip(CASES[num_ranks], itertools.cycle((PARAMS, DRAWN)), strict=False)
    ]
    pool = {2: two_ranks, 4: four_ranks}[num_ranks]
    found, *_ = pool.run(compared, cases)
    for case, (same, far, missed, *_) in zip(cases, found, strict=True):
        assert same and far < 1e-9, (case, far)
        assert all(missed) and bool(missed) == ("expert_slots" in case[3])


def test_whole_experts_are_the_same_to_the_bit(place, two_ranks):
    cases = [
        (place / name, params, {}, {"deterministic": True, "dtype": "bfloat16", **more})
        for name, params, more in (
            ("run", DRAWN, SLOTS),
            ("int8", PARAMS, {}),
            ("int8", DRAWN, EPLB),
            ("int4", DRAWN, EPLB),
            ("fp8", PARAMS, EPLB),
        )
    ]
    found, *_ = two_ranks.run(compared, cases)
    assert [one[:2] for one in found] == [(True, 0.0)] * len(cases)
    assert any(moved for *_, moved, _ in found)
    # slots are in no state; with two copies a rank has three of four
    assert [share for *_, share in found] == [0, 0.5, 0.75, 0.75, 0.75]


def mistakes(place):
    def said(name, **given):
        with pytest.raises((ConfigError, PeerError)) as caught:
            em.Engine(place / name, **COMMON, **given)
        return str(caught.value)

    return [
        said("fp8", parallel={"es_degree": 4}),
        said("int4", parallel={"ep_degree": (3,)}),
        said("run", parallel={}, expert_slots=3),
        said("run", parallel={}, expert_slots=1, enable_eplb=True),
    ]


def test_mistakes_are_named(place, four_ranks):
    expected = (
        (
            "slices of their hidden_dim 256 in whole groups of 128 must make the ranks; use ep_degree x es_degree of "
            "4 x 1, 2 x 2"
        ),
        "whole groups of 64 must make the ranks; use ep_degree x es_degree of 4 x 1, 2 x 2, 1 x 4",
        "expert_slots=3: a layer has 1 experts on a rank; use at most 1",
        "enable_eplb=True: moves experts between the ranks' memories",
    )
    assert_said(four_ranks.run(mistakes, place), expected)
