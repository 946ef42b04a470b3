"""What a plan offers is what training and the engine accept, and no degree that they accept is missing."""

import json

import pytest

import expertmesh as em
from expertmesh.cli.flags import parse_run_config
from expertmesh.config.run import ParallelConfig
from expertmesh.costs.hardware import find_cluster
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.parallelize import check_degrees
from expertmesh.parallel.serving import serving_degrees
from expertmesh.planner.planned_model import planned_model
from expertmesh.planner.search import TENSOR_DEGREES
from expertmesh.planner.search_result import flags_of
from expertmesh.planner.serve import serve_plan, servings
from expertmesh.planner.serving_layout import Serving
from expertmesh.planner.why import why_not

SMALL = {"dim": 64, "num_layers": 2, "vocab_size": 512, "ffn_hidden_dim": 64, "num_heads": 8}
EXPERTS = {"num_experts": (8,), "hidden_dim": 64}
CASES = {
    "14 of 28 heads": ({"num_heads": 28, "num_kv_heads": 14, "head_dim": 8}, EXPERTS, {1, 2}),
    "1 of 2 heads": ({"num_heads": 2, "num_kv_heads": 1}, EXPERTS, {1}),
    "6 of 24 heads": ({"num_heads": 24, "num_kv_heads": 6, "head_dim": 8}, EXPERTS, {1, 2}),
    "norms of projections": ({"qk_norm": True, "qk_norm_scope": "projection"}, EXPERTS, {1}),
    "dense layers of 2730": ({"ffn_hidden_dim": 2730, "moe_every": 2}, EXPERTS, {1, 2}),
    "shared experts": ({}, EXPERTS | {"num_shared_experts": 2, "hidden_dim": 10}, {1, 2, 4}),
    "5 experts of 100": ({}, EXPERTS | {"num_experts": (5,), "hidden_dim": 100}, {1, 2, 4}),
    "no experts": ({}, {"num_experts": ()}, {1, 2, 4, 8}),
    "experts that choose from 128 tokens": (
        {},
        EXPERTS | {"router": "expert_choice", "routing_group_size": 128},
        {1, 2},
    ),
}
QWEN2 = {
    "hidden_size": 224,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "intermediate_size": 592,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 80,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 640,
}


@pytest.fixture(params=CASES)
def case(request):
    """(configuration, tensor degrees that it allows)."""
    model, moe, degrees = CASES[request.param]
    run = {"data": {"seq_len": 256}, "train": {"batch_size": 64, "run_dir": "unused"}}
    return GPTRunConfig.model_validate(run | {"model": SMALL | model | {"moe": moe}}), degrees


def test_training_accepts_every_candidate(case, tmp_path):
    config, degrees = case
    values = config.model_dump(mode="json") | {"recipe": "gpt-moe-demo"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = em.plan(tmp_path, cluster="h100x8")
    for flags in {tuple(flags_of(one, config)) for one in found.candidates}:
        # as a recipe: to read the file again for each takes half of the time
        run = parse_run_config(" ".join(["case", *flags]).split(), recipes={"case": lambda: config}).config
        check_degrees(run.model, run.parallel, num_ranks=8, seq_len=run.data.seq_len)
    from_file = parse_run_config(" ".join([found.model.words, *flags]).split()).config
    assert from_file.model == run.model and from_file.parallel == run.parallel
    assert {one.layout.tp_degree for one in found.candidates} == degrees
    if not config.model.moe.num_experts:
        assert not any("recompute-h" in line for line in why_not(found.best))


def _is_served(config, tp, num_ranks):
    """Whether an engine on these ranks accepts a tensor degree, with different experts on each rank."""
    moe, parallel = config.model.moe, ParallelConfig(tp_degree=tp)
    sizes = {"num_experts": moe.num_experts, "hidden_dim": moe.hidden_dim}
    try:
        found = serving_degrees(parallel, num_ranks=num_ranks, **sizes)
        check_degrees(config.model, parallel, num_ranks=tp)  # as the engine cuts dense layers
    except em.ConfigError:
        return False
    return num_ranks == (found.e * found.f if moe.num_experts else tp)


def test_the_engine_accepts_what_is_offered_and_nothing_else(case):
    config, _ = case
    model, cluster = planned_model(config), find_cluster("h100x8")
    ways = servings(model, cluster, Serving(model.sizes, cluster, 8, 100, 1, 1))
    assert {(way.tp_degree, way.route_degree) for way in ways} == {
        (tp, route) for tp in TENSOR_DEGREES for route in TENSOR_DEGREES if _is_served(config, tp, route)
    }


@pytest.mark.parametrize("kind", ["qwen2_moe", "another"])
def test_heads_of_a_hub_folder_are_cut_whole(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"model_type": kind}))
    found = em.plan(tmp_path, cluster="h100x8")
    assert {one.layout.tp_degree for one in found.candidates} == {1, 2, 4}
    served = serve_plan(tmp_path, cluster="h100x8", batch=8, context=100)
    assert {way.tp_degree for way in served.ways} == {1, 2, 4}


def test_what_cannot_be_cut_says_so():
    moe = EXPERTS | {"num_experts": (5,), "hidden_dim": 2**22 + 2}
    model = SMALL | {"dim": 8192, "head_dim": 64, "moe": moe}
    config = GPTRunConfig.model_validate({"model": model, "train": {"batch_size": 64}})
    with pytest.raises(em.ConfigError, match="slices of experts are whole on 2 devices at most"):
        em.plan(config, cluster="h100x8")
