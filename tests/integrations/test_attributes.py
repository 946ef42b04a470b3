"""Attributes that scripts read from the layers of DeepSpeed and Tutel are served, or say what to use instead."""

import ast
import importlib
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from expertmesh.integrations import deepspeed, tutel

DEEPSPEED = {
    "": "use_residual num_local_experts expert_group_name num_experts ep_size enable_expert_tensor_parallelism",
    "deepspeed_moe": "gate experts ep_group ep_size ep_group_name num_local_experts time_falltoall time_salltoall"
    " time_moe timers wall_clock_breakdown use_tutel l_aux exp_counts",
    "deepspeed_moe.experts": "num_local_experts deepspeed_experts",
    "deepspeed_moe.gate": "wg k capacity_factor eval_capacity_factor min_capacity noisy_gate_policy timers"
    " wall_clock_breakdown gate_time drop_tokens use_rts top2_2nd_expert_sampling ep_group",
}
TUTEL = {
    "": "group result_func skip_moe num_local_experts num_global_experts world_size sharded_count auto_parallel"
    " adaptive_degree use_model_parallel valid_rs model_dim is_postscore batch_prioritized_routing normalize_gate"
    " is_gshard_loss a2a_ffn_overlap_degree use_2dh experts gates protected_shape megablocks_size dispatch_count l_aux",
    "gates.0": "top_k capacity_factor gate_noise fp32_gate wg",
}
REFUSED = [
    *("timers", "wall_clock_breakdown", "gate_time", "time_falltoall", "time_salltoall", "time_moe"),
    "deepspeed_experts",  # of grouped experts
    *("skip_moe", "auto_parallel", "use_model_parallel", "protected_shape", "megablocks_size"),
]


def of_deepspeed():
    layer = deepspeed.MoE(4, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), num_experts=2)
    layer(torch.randn(3, 4))
    return layer


def of_tutel():
    experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8}
    layer = tutel.moe_layer({"type": "top", "k": 2}, 4, experts)
    layer(torch.randn(3, 4))
    return layer


def part_of(layer, path):
    for name in filter(None, path.split(".")):
        layer = layer[int(name)] if name.isdigit() else getattr(layer, name)
    return layer


@pytest.mark.parametrize(
    ("make", "path", "name"),
    [
        (make, path, name)
        for make, table in ((of_deepspeed, DEEPSPEED), (of_tutel, TUTEL))
        for path, names in table.items()
        for name in names.split()
    ],
)
def test_every_attribute_is_served_or_says_what_to_use(make, path, name):
    part = part_of(make(), path)
    is_refused = name in REFUSED or (path.endswith("gate") and name == "ep_group")
    assert hasattr(part, name) != is_refused
    if is_refused:
        with pytest.raises(AttributeError, match=f"^{name} has no counterpart here; .+"):
            getattr(part, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        part.nothing  # noqa: B018


def test_the_lists_are_deepspeeds():
    """Public attributes that DeepSpeed's classes set on themselves."""
    pytest.importorskip("deepspeed", reason="deepspeed not installed")
    classes = {"": "layer.MoE", "deepspeed_moe": "sharded_moe.MOELayer", "deepspeed_moe.gate": "sharded_moe.TopKGate"}
    classes["deepspeed_moe.experts"] = "experts.Experts"
    for path, place in classes.items():
        module, name = place.split(".")
        tree = ast.parse(inspect.getsource(getattr(importlib.import_module(f"deepspeed.moe.{module}"), name)))
        found = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr[0] != "_"
        }
        # modules, of which two are there with use_residual alone, and attributes of parameters
        inside = {"deepspeed_moe", "mlp", "coefficient", "allreduce", "group_name"}
        assert found - inside <= set(DEEPSPEED[path].split())


def group_of_experts():
    layer = of_deepspeed()
    assert layer.deepspeed_moe.ep_group is None
    whole = deepspeed.MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)
    whole.set_deepspeed_parallelism()
    assert dist.get_process_group_ranks(whole.deepspeed_moe.ep_group) == [0, 1]


def test_the_group_of_ranks_that_share_experts(two_ranks):
    two_ranks.run(group_of_experts)
