"""One model of memory: `train --dry-run` and `plan` give equal bytes, by part and in all, for equal layouts."""

import re
from functools import cache
from itertools import pairwise

import pytest

from expertmesh.cli.train import describe
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.memory import GIB, peak_memory
from expertmesh.costs.rank_layout import OURS, RankLayout, Workload
from expertmesh.costs.sizes import sizes_of_hub
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.planner import plan as planning
from expertmesh.planner.configured import as_configured
from expertmesh.planner.planned_model import planned_model

FULL = {"train.activation_checkpointing": True}
FORMS = {
    "checkpointing": FULL,
    "none": {"train.activation_checkpointing": False},
    "recompute h": {"train.activation_checkpointing": False, "model.moe.recompute_h": True},
    "both": FULL | {"model.moe.recompute_h": True},
    "muon, int8": {"optim.name": "muon", "optim.state_dtype": "int8"},
    "muon, float32": {"optim.name": "muon", "optim.state_dtype": "float32"},
    **{f"adamw, {kind}": {"optim.name": "adamw", "optim.state_dtype": kind} for kind in OURS.values()},
    "zero 1, several passes": {"parallel.zero_stage": 1, "train.batch_size": 2048},
    "zero 2": {"parallel.zero_stage": 2},
    "offload": {"parallel.offload": True},
}
OF_EXPERTS = {
    "tokens stay": {"parallel.route_degree": 1},
    "route 4": {"parallel.route_degree": 4, "parallel.zero_stage": 2},
    "hot experts": {"parallel.replicated_experts": 2},
    "slices": {"parallel.es_degree": 2},
    "slices, ep 2": {"parallel.es_degree": 2, "parallel.ep_degree": 2},
    "copies": {"parallel.dp_replicate_degree": 2},
    "offload, slices": {"parallel.offload": True, "parallel.es_degree": 2},
    "tp 2": {"parallel.tp_degree": 2},
}
PYRAMID = {
    "model.num_layers": 8,
    "model.moe.num_experts": (8, 8, 16, 32),
    "parallel.ep_degree": (2, 4, 8, 2),
}
OF_PYRAMIDS = {
    "by layer": {},
    "by layer, slices": {"parallel.es_degree": 2, "parallel.ep_degree": (1, 2, 4, 1)},
    "by layer, hot": {"parallel.replicated_experts": 3, "parallel.zero_stage": 2},
    "by layer, all": FULL | {"parallel.tp_degree": 2, "parallel.offload": True, "parallel.replicated_experts": 1},
}


def cases():
    """Every form for each recipe, on one, 8 or 64 ranks in turn; as it is on all."""
    for place, name in enumerate(RECIPES):
        for num_ranks in (1, 8, 64):
            yield name, num_ranks, "as it is", {}
        for index, (form, changes) in enumerate(FORMS.items()):
            yield name, (1, 8, 64)[(place + index) % 3], form, changes
    for name in ("gpt-moe-demo", "gpt-moe-1b", "gpt-1.3b-moe128", "gpt-350m-prmoe"):
        for num_ranks in (8, 64):
            for form, changes in OF_EXPERTS.items():
                yield name, num_ranks, form, changes
    for num_ranks in (8, 64):
        for form, changes in OF_PYRAMIDS.items():
            yield "gpt-prmoe-demo", num_ranks, form, PYRAMID | changes


made = cache(lambda name: RECIPES[name]())


def configuration(name, num_ranks, changes, dtype):
    config = made(name)
    if not config.model.num_moe_layers:
        changes = {key: value for key, value in changes.items() if ".moe." not in key}
    batch = {"train.micro_batch_size": 2 * num_ranks, "train.batch_size": 2 * num_ranks}
    return config.updated(batch | {"train.dtype": dtype} | changes)


def planned(config, cluster):
    """The configured layout as `plan` counts it, without a search; None: there is none."""
    model = planned_model(config)
    problem, guesses = planning._problem(model, find_cluster(cluster), None, None, None, None, 1, 1)
    found = as_configured(config, problem)
    return found and planning.Plan(model, problem, "throughput", (found,), guesses)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("h100", "bfloat16"),
        ("cpu", "float32"),
        pytest.param("h100", "float16", marks=pytest.mark.exhaustive),
        pytest.param("h100", "float32", marks=pytest.mark.exhaustive),
        pytest.param("cpu", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_the_dry_run_and_the_plan_say_the_same(kind, dtype):
    seen = 0
    for name, num_ranks, form, changes in cases():
        config = configuration(name, num_ranks, changes, dtype)
        found = planned(config, f"{kind}x{num_ranks}")
        if found is None:
            continue  # this recipe has no such layout
        said = gpt_costs(config, num_ranks=num_ranks, dtype=dtype, on_gpu=kind != "cpu").memory
        assert said == found.best.memory, (name, num_ranks, form)
        assert said.parts == found.best.memory.parts and said.device_bytes > 0
        seen += 1
    assert seen > 0.95 * len([*cases()])


def test_both_verbs_print_the_same():
    config = configuration("gpt-prmoe-demo", 8, PYRAMID, "float32")
    found = planned(config, "cpux8")
    line = next(
        line for line in describe(config, GPT, recipe="x", num_ranks=8).splitlines() if line.startswith("memory")
    )
    for words, size in found.best.memory.parts:
        assert f"{words} {size / 2**20:.1f} MiB" in line or f"{words} {size / 2**10:.1f} KiB" in line
        assert re.search(rf"{words} +{size / GIB:.2f}\b", found.text())
    assert "context, buffers and fragments come on top" in line


def test_what_only_gpus_hold():
    costs = {on: gpt_costs(made("gpt-moe-demo"), num_ranks=1, dtype="float32", on_gpu=on) for on in (True, False)}
    gpu, cpu = costs[True].memory, costs[False].memory
    assert cpu.communication_bytes == cpu.allowance_bytes == 0
    assert cpu.device_bytes == cpu.live_bytes == gpu.live_bytes
    assert gpu.device_bytes > gpu.live_bytes + GIB / 2


def test_layers_with_routes_of_their_own_gather_what_they_lack():
    config = configuration("gpt-prmoe-demo", 8, PYRAMID, "float32")
    F, D = config.model.moe.hidden_dim, config.model.dim
    numbers, routes = (8, 8, 16, 32), (2, 4, 8, 2)
    lacks = [0 if r == 8 else 3 * D * F * e // r for e, r in zip(numbers, routes, strict=True)]
    memory = gpt_costs(config, num_ranks=8, dtype="float32").memory
    assert memory.gathered_experts_bytes == 4 * max(a + b for a, b in pairwise(lacks))


@pytest.mark.parametrize("states", OURS)
def test_a_model_of_unknown_shapes_has_the_states_of_its_number_of_parameters(states):
    """The matrices of its layers as one each: what is left in FP32 are small parameters alone."""
    hub = {"hidden_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    hub |= {"num_attention_heads": 16, "intermediate_size": 4096, "num_experts": 64}
    sizes = sizes_of_hub(hub | {"num_experts_per_tok": 2})
    assert sizes.spec.num_parameters == sizes.num_parameters
    each = {"ours": 8, "bf16_moments": 4, "int8_moments": 2.125, "fp16_scaled_moments": 4}
    each |= {"torchao_int8_moments": 2.03125, "torchao_int4_moments": 1.0625}
    for num_ranks in (1, 64):
        layout = RankLayout(num_ranks, route_degree=num_ranks)
        memory = peak_memory(sizes, layout, Workload(2048, states=states))
        part = sizes.num_parameters / num_ranks
        assert memory.weights_bytes == memory.gradients_bytes == pytest.approx(4 * part, rel=1e-3)
        assert memory.optimizer_bytes == pytest.approx(each[states] * part, rel=5e-3)
