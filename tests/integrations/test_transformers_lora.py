"""Adapters of peft on experts: the same numbers as peft's own way, and no tensor as large as all experts on the way."""

import copy

import pytest
import torch
from tests.support.hub_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.integrations.transformers import apply
from expertmesh.testing import numerics

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.23 for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(name, adapters=("default",), dtype=torch.float32):
    """A tiny model with adapters whose second factors are not zero."""
    config = peft.LoraConfig(r=2, lora_alpha=6, target_parameters=TARGETS)
    model = peft.get_peft_model(tiny_model(name, dtype=dtype), config)
    for other in adapters[1:]:
        model.add_adapter(other, config)
    model.base_model.set_adapter(list(adapters))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                parameter.requires_grad_()
    return model


def run(model, implementation, ids, dtype=None):
    model = copy.deepcopy(model)
    model = model if dtype is None else model.to(dtype)
    if implementation == "expertmesh":
        apply(model)
    else:
        model.base_model.model.set_experts_implementation(implementation)
    logits = model(ids).logits
    logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits.dtype))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | grads


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("adapters", [("default",), ("default", "other")], ids=len)
def test_logits_and_gradients_are_peft_s(name, adapters):
    model, ids = adapted(name, adapters), torch.randint(61, (2, 7))
    ours, plain = run(model, "expertmesh", ids), run(model, "eager", ids)
    oracle = run(model, "eager", ids, torch.float64)
    assert ours.keys() == oracle.keys() and any("lora_A" in what for what in ours)
    for what in oracle:
        numerics.assert_two_times(ours[what], plain[what], oracle[what], what=what)


def memory(tree):
    """Addresses of the memory of all tensors in it."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, torch.Tensor)}


class Stacks(TorchDispatchMode):
    """Counts results of three dimensions in memory of their own, no views, with at least so many elements."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = memory((args, kwargs))
        for t in torch.utils._pytree.tree_leaves(found):
            is_own = isinstance(t, torch.Tensor) and t.dim() == 3 and not memory(t) & given
            self.count += is_own and t.numel() >= self.size
        return found


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_nothing_as_large_as_all_experts_is_made(name):
    model = adapted(name)
    size = min(p.numel() for n, p in model.named_parameters() if "experts" in n and p.dim() == 3)
    found = {}
    for implementation in ("grouped_mm", "expertmesh"):
        with Stacks(size) as found[implementation]:
            run(model, implementation, torch.randint(61, (1, 2)))
    with Stacks(size) as copies:  # `run` makes them, too
        copy.deepcopy(model)
    assert found["grouped_mm"].count > copies.count == found["expertmesh"].count


def test_merging_and_saving_stay_peft_s(tmp_path):
    model, ids = adapted("qwen3_moe"), torch.randint(61, (1, 5))
    plain = run(model, "eager", ids)["logits"]
    oracle = run(model, "eager", ids, torch.float64)["logits"]
    apply(model)
    with torch.no_grad():
        before = model(ids).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path)
        apply(again)
        assert torch.equal(again(ids).logits, before)
        merged = model.merge_and_unload()(ids).logits
    numerics.assert_two_times(merged, plain, oracle, what="merged")
