"""Adapters on our experts: the numbers of W + s B A without that sum, frozen and merged, saved in peft's format."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.oracle import numerics
from tests.support.memory import saved_bytes
from tests.support.real_text import byte_windows

import expertmesh as em
from expertmesh import lora
from expertmesh.config.moe import MoEConfig
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.peft import load_adapters, save_adapters
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.upcycle import upcycle
from expertmesh.models.vocabulary import resize_vocabulary
from expertmesh.ops.activation import activate

KINDS = [
    {"activation": "swiglu"},
    {"activation": "gelu", "bias": True},
]


def layer_of(dtype=torch.float32, **options):
    sizes = {"dim": 12, "hidden_dim": 10, "num_experts": 5, "top_k": 2}
    return em.MoELayer(**sizes, **({"seed": 0} | options)).to(dtype)


def adapted(layer, **options):
    """With second factors that are not zero."""
    lora.add(layer, **({"rank": 3, "alpha": 6.0, "seed": 1} | options))
    generator = torch.Generator().manual_seed(2)
    for one in lora.adapters(layer).values():
        one.b.data.copy_(torch.randn(one.b.shape, generator=generator) * 0.3)
    return layer


def run(layer, x_TD, dtype):
    """Output and every gradient there is."""
    x_TD = x_TD.to(dtype).requires_grad_()
    y_TD, stats = layer(x_TD, token_mask=torch.arange(len(x_TD)) != 1)
    (y_TD * torch.linspace(-1, 1, y_TD.numel()).view_as(y_TD).to(dtype)).sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"y": y_TD.detach(), "x": x_TD.grad} | grads


class Summed(torch.nn.Module):
    """W + s B A, as autograd sees it."""

    def __init__(self, adapter):
        super().__init__()
        self.adapter = adapter

    def forward(self, weight):
        a, b = (f.to(weight.dtype) for f in self.adapter.factors())
        return weight + ((b * self.adapter.scaling) @ a).view(-1, *weight.shape[1:])


def plainly(layer):
    """The same layer, which makes the sums."""
    layer = copy.deepcopy(layer)
    experts = layer.experts
    found, experts.adapters = lora.adapters(layer), None
    for name, one in found.items():
        torch.nn.utils.parametrize.register_parametrization(experts, name.rpartition(".")[2], Summed(one))
    return layer


def looped(layer):
    """The same layer, whose experts are a plain loop: x W^T + s (x A^T) B^T for one expert after the other."""
    layer = copy.deepcopy(layer)
    experts = layer.experts

    def low_of(one, rows, counts):
        parts = [rows] if one.shared else rows.split(counts)
        factors = zip(*(f.to(rows.dtype) for f in one.factors()), strict=True)
        found = [F.linear(F.linear(x, a), b) for x, (a, b) in zip(parts, factors, strict=True)]
        return torch.cat(found) * one.scaling

    def forward(x_TD, ids_TK, weights_TK, *, max_rows, parameters=None):
        E, slots = experts.num_experts, ids_TK.flatten().argsort(stable=True)
        slots = slots[ids_TK.flatten()[slots] < E]
        counts = ids_TK.flatten().bincount(minlength=E)[:E].tolist()
        rows = x_TD[slots // ids_TK.shape[1]]
        for name in ("w_in", "w_out"):
            bias = getattr(experts, name.replace("w_", "b_"))
            products = [
                F.linear(
                    x,
                    getattr(experts, name)[e].flatten(0, -2),
                    bias if bias is None else bias[e].flatten(),
                )
                for e, x in enumerate(rows.split(counts))
            ]
            low = low_of(getattr(experts.adapters, name), rows, counts)
            rows = torch.cat(products) + low
            if name == "w_in":
                rows = activate(rows.unflatten(1, (-1, experts.w_out.shape[2])), experts.activation)
        rows = rows * weights_TK.flatten()[slots][:, None].to(rows.dtype)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
        return y_TD.index_add(0, slots // ids_TK.shape[1], rows.float()).to(x_TD.dtype)

    experts.forward = forward
    return layer


def renamed(found):
    """Gradients of the adapters by one name."""
    short = {}
    for name, value in found.items():
        name = name.replace("experts.parametrizations.", "experts.adapters.")
        name = name.replace(".0.adapter.", ".")
        short[name] = value
    return short


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k["activation"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_are_those_of_the_sum(kind, shared, dtype):
    layer, x = adapted(layer_of(**kind), shared=shared), torch.randn(160, 12)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.to(dtype))
    wide = copy.deepcopy(layer).double()
    oracle = renamed(run(plainly(wide), x.to(dtype), torch.float64))
    for p in layer.experts.parameters(recurse=False):
        p.data = p.data.to(dtype)
    ours = run(layer, x, dtype)
    plain = run(looped(layer), x, dtype)
    assert ours.keys() == oracle.keys() and "experts.adapters.w_out.a" in ours
    assert "experts.w_in" not in ours and "router.proj.weight" not in ours
    for what in oracle:
        numerics.assert_two_times(ours[what], plain[what], oracle[what], what=what)


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_all():
    layer, x = layer_of(), torch.randn(7, 12)
    before = layer(x)[0]
    lora.add(layer, rank=2, seed=0)
    numerics.assert_two_times(layer(x)[0], before, layer_of().double()(x.double())[0], what="fresh")
    lora.remove(layer)
    layer = adapted(layer)
    wide = copy.deepcopy(layer).double()
    oracle, plain = wide(x.double())[0], layer(x)[0]
    assert lora.merge(layer) == 1 and layer.experts.adapters is None
    assert all(p.requires_grad for p in layer.parameters())
    numerics.assert_two_times(layer(x)[0], plain, oracle, what="merged")
    numerics.assert_differs(layer(x)[0], before, what="merged")


@pytest.mark.parametrize("end", [lora.merge, lora.remove])
def test_what_adapters_did_not_freeze_is_as_it_was_after_them(end):
    layer = layer_of()
    layer.router.requires_grad_(False)
    before = {name: p.requires_grad for name, p in layer.named_parameters()}
    lora.add(layer, rank=2, freeze=False, seed=0)
    end(layer)
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == before
    lora.add(layer, rank=2, seed=0)
    assert not layer.experts.w_in.requires_grad
    end(layer)
    assert all(p.requires_grad for p in layer.parameters())


def test_weights_in_any_order_of_memory_are_merged():
    layer, x = layer_of(), torch.randn(7, 12)
    layer.experts.w_in = torch.nn.Parameter(layer.experts.w_in.mT.contiguous().mT)
    before = adapted(layer)(x)[0]
    lora.merge(layer)
    torch.testing.assert_close(layer(x)[0], before)


def test_a_reset_layer_computes_without_its_adapters():
    """So does a model that gets its memory after its adapters."""
    x = torch.randn(7, 12)
    layer = adapted(layer_of())
    layer.reset_parameters(5)
    plain = layer_of()
    plain.reset_parameters(5)
    torch.testing.assert_close(layer(x)[0], plain(x)[0])
    assert all(one.a.any() for one in lora.adapters(layer).values())


def test_nothing_as_large_as_all_experts_is_kept():
    layer = em.MoELayer(dim=32, hidden_dim=64, num_experts=16, top_k=1, seed=0)
    adapted(layer, rank=1)
    size = layer.experts.w_in.numel() * 4
    weights = list(layer.parameters())
    own = saved_bytes(lambda: layer(torch.randn(4, 32))[0], parameters=weights)
    summed = plainly(layer)
    theirs = saved_bytes(lambda: summed(torch.randn(4, 32))[0], parameters=list(summed.parameters()))
    assert own < size / 4 < size < theirs


def test_what_cannot_work_is_refused_in_one_line():
    layer = layer_of()
    for options, words in (
        ({"rank": 0}, "rank=0: must be a whole number of at least 1"),
        ({"alpha": 0}, "alpha=0: must be a finite number above 0"),
        ({"rank": True}, "rank=True: must be a whole number of at least 1"),
        ({"alpha": "2"}, "alpha='2': must be a finite number above 0"),
        (
            {"targets": ("w_in", "w_up")},
            "w_up matches nothing that takes an adapter; there are experts",
        ),
        ({"targets": "w_in"}, "targets='w_in': must be a list of names"),
        ({"expert_rank": 0}, "expert_rank=0: must be a whole number of at least 1"),
        ({"rank": 999}, "rank=999: is above"),
    ):
        with pytest.raises(ConfigError, match=words):
            lora.add(layer, **options)
    with pytest.raises(ConfigError, match="experts matches nothing that takes an adapter; there are none"):
        lora.add(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no adapters"):
        lora.merge(layer)
    lora.add(layer)
    with pytest.raises(ConfigError, match="has adapters already"):
        lora.add(layer)
    layer.experts.accumulate_main_grads()
    layer(torch.randn(3, 12))  # frozen experts
    layer.requires_grad_(True)
    with pytest.raises(ConfigError, match="main gradients with adapters .*; freeze the experts"):
        layer(torch.randn(3, 12))


def test_weights_are_not_copied_or_cut_without_their_adapters():
    dense = em.GPT(
        ModelConfig(dim=24, num_heads=2, num_layers=1, tie_embeddings=False, moe={"num_experts": ()}),
        seed=0,
    )
    lora.add(dense, rank=2, targets=("dense", "head"))
    with pytest.raises(ConfigError, match="model has adapters; merge"):
        upcycle(dense, num_experts=2)
    with pytest.raises(ConfigError, match="model has adapters"):
        resize_vocabulary(dense, 300)


def gpt(**options):
    sizes = {"vocab_size": 256, "max_seq_len": 32, "dim": 24, "num_layers": 2, "num_heads": 2}
    moe = MoEConfig(num_experts=(4,), top_k=2, hidden_dim=16)
    config = ModelConfig(**sizes, ffn_hidden_dim=48, qk_norm=True, init_std=0.1, moe=moe, **options)
    return em.GPT(config, seed=0)


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"targets": ("w_out",)}], ids=str)
def test_adapters_are_saved_and_loaded_to_the_bit(options, tmp_path):
    model, again = adapted(gpt(), **options), gpt()
    save_adapters(model, tmp_path)
    assert load_adapters(again, tmp_path) == 2
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if "adapters" in n
    }


def test_adapters_that_do_not_fit_are_refused_by_name(tmp_path):
    save_adapters(adapted(gpt()), tmp_path)
    path, tensors = tmp_path / "adapter_model.safetensors", None
    tensors = load_file(path)
    key = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    for change, words in (
        (lambda t: t.pop(key), f"has no tensor {key}"),
        (lambda t: t.update({key: t[key].T.contiguous()}), r"mlp.experts.lora_B.weight has shape"),
        (lambda t: t.update({"x": torch.zeros(1)}), "has a tensor x"),
    ):
        spoiled = dict(tensors)
        change(spoiled)
        save_file(spoiled, path)
        model = gpt()
        with pytest.raises(CheckpointError, match=words):
            load_adapters(model, tmp_path)
        assert model.layers[0].moe.experts.adapters is None
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora=True"),
        ({"target_parameters": ["mlp.gate.weight"]}, "is on no experts"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": 0}, "r=0 in adapter_config.json: must be a whole number above 0"),
        ({"lora_alpha": 0}, "lora_alpha=0 in adapter_config.json: must be a finite number above 0"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match=words):
            load_adapters(gpt(), tmp_path)
    with pytest.raises(ConfigError, match="no readable adapter_config.json"):
        load_adapters(gpt(), tmp_path / "nowhere")


def test_adapters_lie_below_the_home_folder_as_runs_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_adapters(adapted(gpt()), "~/adapters")
    assert (tmp_path / "adapters").is_dir() and load_adapters(gpt(), "~/adapters") == 2


def test_a_fine_tuned_model_forgets_nothing_and_learns_real_text():
    """Adapters alone bring the loss on text down, while every other parameter keeps its bits."""
    from expertmesh.models.token_losses import token_losses

    model = gpt()
    before = copy.deepcopy(model.state_dict())
    lora.add(model, rank=8, alpha=16, seed=0)
    train, check = byte_windows(33), byte_windows(33, split="validation")[:32]
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=2e-2)

    def loss_of(ids):
        return token_losses(model(ids[:, :-1]).logits_BSV, ids[:, 1:]).mean()

    with torch.no_grad():
        start = loss_of(check)
    for step in range(25):
        optimizer.zero_grad()
        loss_of(train[step * 16 : step * 16 + 16]).backward()
        optimizer.step()
    with torch.no_grad():
        assert start - loss_of(check) > 0.3
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name
