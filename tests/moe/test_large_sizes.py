"""Sizes that no memory holds are named, whoever is asked to make such weights; the meta device needs none."""

import pytest
import torch

import expertmesh as em
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig

LAYER = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2}
HUGE = 10**9


def gpt(**changes):
    return lambda device: em.GPT(ModelConfig(**changes), device=device)


def layer(**changes):
    return lambda device: em.MoELayer(**LAYER | changes, device=device)


MODELS = {
    "layer: dim": (layer(dim=HUGE * 1000, hidden_dim=HUGE // 4), "dim=1000000000000"),  # so is the router's weight
    "layer: hidden_dim": (layer(hidden_dim=HUGE * 100), "hidden_dim=100000000000"),
    "layer: num_experts": (layer(num_experts=HUGE, dim=1024), "num_experts=1000000000"),
    "layer: shared_hidden_dim": (layer(shared_hidden_dim=HUGE * 100), "shared_hidden_dim=100000000000"),
    "gpt: dim": (gpt(dim=HUGE, num_heads=4), "model.dim=1000000000"),
    "gpt: vocab_size": (gpt(vocab_size=2**31 - 1, dim=8192), "model.vocab_size=2147483647"),
    "gpt: ffn_hidden_dim": (gpt(ffn_hidden_dim=HUGE * 10, moe={"num_experts": ()}), "model.ffn_hidden_dim=10000000000"),
    "gpt: hidden_dim": (gpt(moe={"hidden_dim": HUGE * 10}), "model.moe.hidden_dim=10000000000"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_size_that_no_memory_holds_is_named(name):
    assert_named(*MODELS[name])


def assert_named(make, words):
    with pytest.raises(ConfigError, match=f"^{words}: .* too large for memory; lower it") as caught:
        make("cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [gpt(dim=1 << 20, num_heads=4), layer(dim=1 << 24, hidden_dim=1 << 24)])
def test_the_meta_device_has_room_for_more_than_there_is(make):
    model = make("meta")
    assert sum(p.nbytes for p in model.parameters()) > 2**42
    assert all(p.is_meta for p in model.parameters())


def test_other_errors_are_as_they_were():
    def broken(index):
        raise RuntimeError("of the user's own module")

    with pytest.raises(RuntimeError, match="of the user's own module"):
        em.MoELayer(**LAYER, experts=broken)
    assert torch.equal(em.MoELayer(**LAYER, seed=0).experts.w_in, em.MoELayer(**LAYER, seed=0).experts.w_in)
