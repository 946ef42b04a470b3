"""A model spread on the meta device and then initialised is that of one process, to the bit, and was never whole."""

import pytest
import torch
from tests.support.form_case import FORMS
from tests.support.memory import peak_bytes

from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.construct import give_memory

LAYOUTS = FORMS | {
    "sliced": {"es_degree": 2, "expert_order": "experts_inner"},
    "tensor parallel": {"tp_degree": 4},
}
CHANGES = {
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.qk_norm": True,
    "model.moe_every": 2,
    "model.moe.num_shared_experts": 1,
    "model.moe.residual": True,
    "model.moe.bias": True,
    "model.tie_embeddings": False,
}


def config_of(changes):
    return RECIPES["gpt-moe-test"]().updated(CHANGES | changes).model


def construct(config, parallel, world, *, seed, dtype):
    model = GPT(config, device="meta", dtype=dtype)
    parallelize_gpt(model, parallel, world=world)
    give_memory(model, device="cpu", offload=parallel.offload)
    model.init_weights(seed)
    return model


def differing(changes, options, dtype):
    """Names of tensors that differ from the model of one process by a bit, and the number of all."""
    config, parallel, world = config_of(changes), ParallelConfig(**options), World()
    spread = construct(config, parallel, world, seed=3, dtype=dtype).state_dict()
    whole = GPT(config, dtype=dtype, seed=3).state_dict()
    assert spread.keys() == whole.keys()
    found = []
    for name, tensor in spread.items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if not torch.equal(tensor.cpu(), whole[name]):
            found.append(name)
    world.close()
    return found, len(whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(four_ranks, layout):
    for found, number in four_ranks.run(differing, {}, LAYOUTS[layout], torch.float32):
        assert found == [] and number > 20


def test_latent_attention(four_ranks):
    changes = {
        "model.qk_norm": False,
        "model.latent.kv_lora_rank": 9,
        "model.latent.q_lora_rank": 7,
    }
    for found, _ in four_ranks.run(differing, changes, {"tp_degree": 2}, torch.float32):
        assert found == []


@pytest.mark.parametrize("options", [{}, {"tp_degree": 2}], ids=str)
def test_uneven_parts(four_ranks, options):
    changes = {"model.dim": 65, "model.head_dim": 16}
    for found, _ in four_ranks.run(differing, changes, options, torch.float32):
        assert found == []


@pytest.mark.parametrize("router", ["cosine", "hash"])
def test_other_routers_and_fp64(two_ranks, router):
    changes = {"model.moe.router": router}
    if router == "cosine":
        changes["model.moe.bias_update_rate"] = 0.1
    for found, _ in two_ranks.run(differing, changes, {}, torch.float64):
        assert found == []


def peak_of_construction(num_layers):
    """The most bytes held at a time while a rank constructs its part, and those of the whole model."""
    config = config_of({"model.num_layers": num_layers})
    world = World()
    parallelize_gpt(GPT(config, device="meta"), ParallelConfig(), world=world)  # makes the groups
    most = peak_bytes(lambda: construct(config, ParallelConfig(), world, seed=0, dtype=torch.float32))
    world.close()
    shapes = [p.numel() for p in GPT(config, device="meta").parameters()]
    return most, 4 * sum(shapes), 4 * max(shapes)


def test_never_whole(four_ranks):
    """A quarter of the model, and one parameter at a time: drawn, in its type, and cut."""
    for most, whole, largest in four_ranks.run(peak_of_construction, 8):
        assert most < whole / 4 + 4 * largest < whole
