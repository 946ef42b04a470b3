"""Adapters of peft on experts: the same numbers as peft's own way, and no tensor as large as all experts on the way."""

import copy

import pytest
import torch
from tests.oracle import numerics
from tests.support.hub_models import logits_and_gradients, tiny_model
from tests.support.real_text import byte_windows
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh import lora
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import load_pretrained
from expertmesh.integrations.peft import load_adapters, save_adapters
from expertmesh.integrations.transformers import ExpertMeshConfig, ExpertMeshForCausalLM, apply
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.token_losses import token_losses

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


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("adapters", [("default",), ("default", "other")], ids=len)
def test_logits_and_gradients_are_peft_s(name, adapters):
    model, ids = adapted(name, adapters), torch.randint(61, (2, 7))
    ours, oracle = (
        logits_and_gradients(model, ids),
        logits_and_gradients(model, ids, "eager", torch.float64),
    )
    plain = [logits_and_gradients(model, ids, how) for how in ("eager", "grouped_mm")]
    plain.append(logits_and_gradients(model, ids, "eager", turned=True))
    assert ours.keys() == oracle.keys() and any("lora_A" in what for what in ours)
    for what in oracle:
        same = [found[what] for found in plain]
        numerics.assert_two_times(ours[what], same, oracle[what], what=what)


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
            logits_and_gradients(model, torch.randint(61, (1, 2)), implementation)
    with Stacks(size) as copies:  # `run` makes them, too
        copy.deepcopy(model)
    assert found["grouped_mm"].count > copies.count == found["expertmesh"].count


def test_merging_and_saving_stay_peft_s(tmp_path):
    model, ids = adapted("qwen3_moe"), torch.randint(61, (1, 5))
    plain = logits_and_gradients(model, ids, "eager")["logits"]
    oracle = logits_and_gradients(model, ids, "eager", torch.float64)["logits"]
    apply(model)
    with torch.no_grad():
        before = model(ids).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path)
        apply(again)
        assert torch.equal(again(ids).logits, before)
        merged = model.merge_and_unload()(ids).logits
    numerics.assert_two_times(merged, plain, oracle, what="merged")


def test_adapters_travel_between_peft_and_our_gpt(tmp_path):
    """A Qwen3-MoE of the hub is fine-tuned as our GPT; peft loads the adapters onto the original, and ours come
    back."""
    model, text = tiny_model("qwen3_moe", vocab_size=256, num_key_value_heads=1), byte_windows(17)
    model.save_pretrained(tmp_path / "hub")
    ours = load_pretrained(tmp_path / "hub")
    lora.add(ours, rank=4, alpha=8, seed=0)
    optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad], lr=2e-2)
    check = byte_windows(17, split="validation")[:64]

    def loss_of(ids):
        return token_losses(ours(ids[:, :-1]).logits_BSV, ids[:, 1:]).mean()

    with torch.no_grad():
        start = loss_of(check)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(text[step * 16 : step * 16 + 16]).backward()
        optimizer.step()
    with torch.no_grad():
        assert start - loss_of(check) > 0.3
    save_adapters(ours, tmp_path / "adapters")
    ids, found = check[:16], {}  # enough for the largest of many errors
    for dtype in (torch.float32, torch.float64):
        theirs = peft.PeftModel.from_pretrained(
            copy.deepcopy(model), tmp_path / "adapters", autocast_adapter_dtype=False
        ).to(dtype)
        theirs.base_model.model.set_experts_implementation("eager")
        with torch.no_grad():
            seen = theirs.eval()(ids, output_hidden_states=True)
        found[dtype] = seen.logits
    with torch.no_grad():
        mine = ours.eval()(ids).logits_BSV
    # a logit is a sum whose parts cancel
    parts = seen.hidden_states[-1].abs() @ theirs.get_output_embeddings().weight.abs().T
    # two programs of many layers in FP32: a few hundred roundings of the size of the parts
    atol = 256 * 2**-24 * float(parts.detach().max())
    torch.testing.assert_close(mine.double(), found[torch.float64], rtol=0, atol=atol)
    theirs.to(torch.float32).save_pretrained(tmp_path / "again")
    again = load_pretrained(tmp_path / "hub")
    load_adapters(again, tmp_path / "again")
    for name, value in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_peft_s_adapters_on_all_linear_maps_of_our_model_learn_and_generate():
    """Those of the router, of the dense parts beside the experts and of the output among them."""
    options = {"vocab_size": 64, "max_seq_len": 32, "dim": 16, "num_layers": 2, "num_heads": 2}
    moe = {"num_experts": (4,), "hidden_dim": 16, "residual": True}
    moe |= {"num_shared_experts": 1, "shared_gate": True}
    gpt = ModelConfig(**options, tie_embeddings=False, init_std=0.3, moe=moe)
    model = ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt, eos_token_id=0, pad_token_id=0))
    targets = ["qkv", "out", "proj", "shared_gate", "residual_coefficient", "output"]
    where = {"target_modules": targets, "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **where))
    ids = torch.randint(1, 64, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * (2 * 5 + 1)
    assert not [n for n, p in learning.items() if p.grad is None or not p.grad.any()]
    assert model.eval().generate(input_ids=ids, max_new_tokens=2).shape == (2, 11)
    with pytest.raises(ConfigError, match="output_hidden_states: is no argument of a GPT"):
        model(input_ids=ids, output_hidden_states=True)


def our_model():
    sizes = {"vocab_size": 64, "max_seq_len": 32, "dim": 16, "num_layers": 1, "num_heads": 2}
    gpt = ModelConfig(**sizes, init_std=0.3, moe={"num_experts": (4,), "hidden_dim": 16})
    return ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt, eos_token_id=0, pad_token_id=0))


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize("targets", [["experts.w_in"], ["moe.experts.w_out", "moe.experts.w_in"]], ids=len)
def test_target_parameters_on_stacks_of_four_axes_are_refused_with_the_way_that_works(targets, way):
    model = our_model()
    config = peft.LoraConfig(r=2, target_modules=["qkv"], target_parameters=targets)
    refusal = r"experts.w_in has 4 axes.*expertmesh.lora.add\(model.gpt, freeze=False\)"
    with pytest.raises(ConfigError, match=refusal) as caught:
        if way == "add_adapter":
            model.add_adapter(config)
        else:
            peft.get_peft_model(model, config)
    assert "\n" not in str(caught.value)


def test_adapters_of_both_learn_side_by_side():
    """peft's on maps, ours on the experts: what the refusal above names."""
    ids = torch.randint(1, 64, (2, 9))
    model = our_model()
    both = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv"]))
    assert lora.add(model.gpt, rank=2, freeze=False) == 1
    both(input_ids=ids, labels=ids).loss.backward()
    learning = {n for n, p in both.named_parameters() if p.requires_grad}
    assert len(learning) == 2 + 2 * 2 and all("lora_" in n or "adapters" in n for n in learning)
    assert all(p.grad is not None for p in both.parameters() if p.requires_grad)


def test_target_parameters_on_a_stack_of_three_axes_count_and_merge():
    ids = torch.randint(1, 64, (2, 9))
    model = our_model().eval()
    plain = model(input_ids=ids).logits
    where = {"target_parameters": ["experts.w_out"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **where)).eval()
    changed = adapted(input_ids=ids).logits
    numerics.assert_differs(changed, plain, what="logits")
    merged = adapted.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, changed)
