"""Memory of weights that rest under adapters: the bytes of the tensors themselves, and the published sizes on one
card."""

import math

import pytest
import torch

from expertmesh.config.frozen_base import QUANTIZED
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.memory import GIB
from expertmesh.models.gpt.builder import GPTBuilder
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.recipes import gpt_moe_test
from expertmesh.models.gpt.sizes import GPTSizes
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.planner import plan as planning
from expertmesh.planner.configured import as_configured
from expertmesh.planner.planned_model import planned_model
from expertmesh.planner.published import published_models
from expertmesh.spec.resting import LAYOUTS, Resting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [n for n, one in FORMATS.items() if one.name == n])
@pytest.mark.parametrize("shape", [(5, 2, 192, 384), (3, 130, 256)])
def test_bytes_of_a_format_are_those_of_its_tensors(form, shape, dtype):
    for group in (32, 64, 128):
        kept = FORMATS[form].kept(shape, dtype, group).values()
        expected = sum(math.prod(size) * kind.itemsize for size, kind in kept)
        name = "products" if form == "dense" else form
        assert Resting(name, group).num_bytes(shape, element_bytes=dtype.itemsize) == expected


def test_every_format_has_its_bytes():
    known = {name for name, one in FORMATS.items() if one.name == name}
    assert set(LAYOUTS) == known - {"dense"} | {"products", "float32"}


QWEN3 = {
    "adapter.kind": "lora",
    "data.seq_len": 2048,
    "train.init_from": "models/Qwen3-30B-A3B",
    "train.batch_size": 16,
    "train.micro_batch_size": 1,
    "train.dtype": "bfloat16",
    "train.activation_checkpointing": True,
}
"""One sequence of 2,048 tokens a pass, adapters on attention and experts."""


def memory_of_both(changes):
    """Peak memory of Qwen3-30B-A3B on one H100, as the dry run and as the plan count it."""
    sizes = published_models()["qwen3-30b"]
    assert isinstance(sizes, GPTSizes)
    config = GPTRunConfig().updated({"model": sizes.config, **QWEN3, **changes})
    problem, _ = planning._problem(planned_model(config), find_cluster("h100x1"), None, None, None, None, 1, 1)
    found = as_configured(config, problem)
    assert found is not None
    said = gpt_costs(config, num_ranks=1, dtype="bfloat16", on_gpu=True)
    assert said.memory == found.memory and said.parameters == sizes.num_parameters
    return said.memory


@pytest.mark.parametrize("storage", ["int4", "nf4"])
def test_qwen3_30b_learns_adapters_within_24_gb(storage):
    memory = memory_of_both({"base.storage": storage})
    assert memory.live_bytes < 24e9 and memory.device_bytes < 24 * GIB  # of a card of 24 GB
    wide = memory_of_both({"base.storage": "bfloat16"})
    assert wide.weights_bytes > 61e9 and wide.optimizer_bytes == memory.optimizer_bytes
    learned = memory.gradients_bytes / 4
    assert memory.optimizer_bytes == 8 * learned and 60e6 < learned < 120e6


@pytest.mark.parametrize("storage", [*QUANTIZED, "bfloat16", "float32"])
def test_states_are_the_bytes_of_the_model_and_its_optimizer(storage):
    """The model as training places it, on the meta device, with a shared expert and tied embeddings or none."""
    changes = {"adapter.kind": "lora", "base.storage": storage, "train.init_from": "runs/x"}
    for more in ({}, {"model.moe.num_shared_experts": 2, "model.tie_embeddings": True}):
        config = gpt_moe_test().updated(changes | {"train.dtype": "bfloat16"} | more)
        dtype = torch.float32 if storage == "float32" else torch.bfloat16
        model = GPTBuilder(config)._adapted(device=torch.device("meta"), dtype=dtype)
        if storage in QUANTIZED:
            for _, _, experts in grouped_layers(model):
                experts.hold(storage, experts.room(storage, dtype=dtype), dtype=dtype)
        memory = gpt_costs(config, num_ranks=1, dtype="bfloat16").memory
        learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert memory.weights_bytes == sum(t.nbytes for t in model.state_dict().values())
        assert memory.gradients_bytes == 4 * learned and memory.optimizer_bytes == 8 * learned


@pytest.mark.parametrize("storage", [*QUANTIZED, "bfloat16"])
def test_gathered_experts_travel_as_codes(storage):
    """Two ranks that gather all experts of a layer: what they have at once is codes and scales, and one expert is
    widened."""
    changes = {"adapter.kind": "lora", "base.storage": storage, "train.init_from": "runs/x"}
    changes |= {"parallel.route_degree": 1, "adapter.targets": ("attention",)}
    wide = storage == "bfloat16"
    if wide:
        changes["base.storage"] = "auto"
    config = gpt_moe_test().updated(changes)
    memory = gpt_costs(config, num_ranks=2, dtype="bfloat16").memory
    model = GPTBuilder(config)._adapted(device=torch.device("meta"), dtype=torch.float32)
    each, experts = [], None
    for _, _, experts in grouped_layers(model):
        kept = [experts.w_in, experts.w_out]
        if not wide:
            kept = experts.room(storage, dtype=torch.float32).values()
        each.append(sum(t.numel() * 2 if wide else t.nbytes for t in kept))
    assert memory.gathered_experts_bytes == max(map(sum, zip(each, each[1:], strict=False)))
    E, G, F, D = experts.shape
    assert memory.copies_bytes == (0 if wide else 2 * G * F * D)
    at_once = gpt_costs(config, num_ranks=1, dtype="bfloat16", on_gpu=True).memory.copies_bytes
    at_once -= gpt_costs(config, num_ranks=1, dtype="bfloat16").memory.copies_bytes
    assert at_once == (0 if wide else 2 * (E - 1) * G * F * D)  # a GPU widens some at once, here all
