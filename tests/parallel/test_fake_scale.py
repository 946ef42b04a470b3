"""The recipes for clusters on 64, 512 and 2,048 ranks of the fake process group: what the planner says is what a rank
holds.

Parameters are on the meta device; gradients and moments are those of PyTorch's AdamW there, and checkpoint bytes are
those of the plan that torch.distributed.checkpoint makes for this rank.
"""

from functools import cache

import pytest
import torch
from tests.parallel.test_fake_world import rank_of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from expertmesh.config.run import ParallelConfig
from expertmesh.costs.memory import peak_memory
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import recipe

TWO_PERCENT = 0.02
RANKS = (64, 512, 2048)
LAYOUTS = {
    "E": {},
    "E+Z1": {"zero_stage": 1},
    "E+Z2": {"zero_stage": 2},
    "route 8": {"route_degree": 8},
    "route 8, Z1": {"route_degree": 8, "zero_stage": 1},
    "route 64, Z2": {"route_degree": 64, "zero_stage": 2},
    "tokens stay": {"route_degree": 1},
    "tokens stay, Z1": {"route_degree": 1, "zero_stage": 1},
    "8 copies": {"dp_replicate_degree": 8},
    "8 copies, Z2": {"dp_replicate_degree": 8, "zero_stage": 2},
    "2 copies, route 4": {"dp_replicate_degree": 2, "route_degree": 4},
    "4 slices": {"es_degree": 4},
    "16 slices, route 32": {"es_degree": 16, "route_degree": 32},
    "8 slices, inner experts": {"es_degree": 8, "expert_order": "experts_inner"},
    "tp 2": {"tp_degree": 2},
    "tp 8": {"tp_degree": 8},
    "tp 8, Z2, route 8": {"tp_degree": 8, "zero_stage": 2, "route_degree": 8},
    "tp 4, 4 copies, Z1": {"tp_degree": 4, "dp_replicate_degree": 4, "zero_stage": 1},
    "offload": {"offload": True},
    "offload, Z2, tp 2": {"offload": True, "zero_stage": 2, "tp_degree": 2},
    "offload, 2 copies": {"offload": True, "dp_replicate_degree": 2},
    "offload, 8 slices, route 16": {"offload": True, "es_degree": 8, "route_degree": 16},
}
MODELS = ("gpt-1.1t", "gpt-3.5t", "gpt-400b", "gpt-15b", "gpt-100b")
_OF_EXPERTS = {"route_degree", "es_degree", "expert_order"}
SAMPLE = {
    *(("gpt-1.1t", 512, name) for name in ("E", "route 64, Z2", "tp 8", "offload")),
    *(("gpt-1.1t", 2048, name) for name in ("4 slices", "8 copies, Z2")),
    ("gpt-3.5t", 2048, "offload, 8 slices, route 16"),
    ("gpt-400b", 64, "16 slices, route 32"),
    ("gpt-400b", 64, "tokens stay, Z1"),
    ("gpt-15b", 64, "E+Z2"),
    ("gpt-100b", 512, "tp 8"),
}
"""Some of all for every run; `exhaustive` has the rest."""


experts_of = cache(lambda model: recipe(model).model.moe.num_experts)


def is_possible(model, num_ranks, layout):
    """Whether there are experts to route to, and slices enough that each rank has a part of one."""
    experts = experts_of(model)
    if not experts:
        return not _OF_EXPERTS & layout.keys()
    W = num_ranks // layout.get("dp_replicate_degree", 1)
    slices = layout.get("es_degree")
    return slices is None or experts[0] % (W // slices) == 0


def cases():
    for model in MODELS:
        for num_ranks in RANKS:
            for name, layout in LAYOUTS.items():
                if not is_possible(model, num_ranks, layout):
                    continue
                case = (model, num_ranks, name)
                yield pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.exhaustive)


def test_the_layouts_are_many_and_the_sample_is_of_them():
    assert len(LAYOUTS) >= 20
    assert {tuple(case.values) for case in cases()} >= SAMPLE


def bytes_of(value):
    return (value.to_local() if hasattr(value, "to_local") else value).nbytes


def checkpoint_bytes(state):
    """Of tensors, as this rank plans to write them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=False)
    items = planner.create_local_plan().items
    return sum(
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in items
        if item.tensor_data is not None
    )


@pytest.mark.parametrize(("model", "num_ranks", "name"), [*cases()])
def test_a_rank_holds_what_the_planner_says(model, num_ranks, name):
    config, parallel = recipe(model).model, ParallelConfig(**LAYOUTS[name])
    W = num_ranks // parallel.dp_replicate_degree
    layout = RankLayout(
        num_ranks,
        tp_degree=parallel.tp_degree,
        route_degree=parallel.route_degree or W,
        es_degree=parallel.es_degree,
        dp_replicate_degree=parallel.dp_replicate_degree,
        zero_stage=parallel.zero_stage,
        offload=parallel.offload,
    )
    said = peak_memory(sizes_of(config), layout, Workload(2048))
    on_device = {"weights": said.weights_bytes, "gradients": said.gradients_bytes}
    on_device["optimizer"] = said.optimizer_bytes
    # What no axis of which the ranks divide is cut in pieces of the first one, of which rank 0 has the largest.
    with rank_of(num_ranks, 0) as (world, asked):
        model_ = GPT(config, device="meta", seed=0)
        parallelize_gpt(model_, parallel, world=world)
        optimizer = torch.optim.AdamW(model_.parameters(), foreach=False)
        for parameter in model_.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        held = {
            "weights": sum(map(bytes_of, model_.parameters())),
            "gradients": sum(bytes_of(p.grad) for p in model_.parameters()),
            "optimizer": sum(
                bytes_of(value) for state in optimizer.state.values() for key, value in state.items() if key != "step"
            ),
        }
        tensors = {name: parameter.detach() for name, parameter in model_.named_parameters()}
        tensors |= {
            f"{name}.{key}": optimizer.state[parameter][key]
            for name, parameter in model_.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
        written = checkpoint_bytes(tensors)
        assert len(asked) <= 4 * num_ranks  # groups of a few partitions of all ranks
    if parallel.offload:
        assert sum(held.values()) == pytest.approx(said.host_bytes, rel=TWO_PERCENT)
        assert not any(on_device.values())
    else:
        assert held == pytest.approx(on_device, rel=TWO_PERCENT)
    assert written == pytest.approx(said.checkpoint_bytes, rel=TWO_PERCENT)
