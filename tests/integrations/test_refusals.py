"""What methods leave behind where they refuse: nothing. Weights, what learns, modes, modules and configuration are as
they were."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracle import numerics
from tests.support.hub_models import tiny_model
from torch import nn

import expertmesh as em
from expertmesh.checkpoints.hub.load_pretrained import HubModel
from expertmesh.checkpoints.peft_folder import CONFIG, WEIGHTS
from expertmesh.checkpoints.source import read_into
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations import fairseq, tutel
from expertmesh.integrations.deepspeed import MoE as DeepSpeedMoE
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.integrations.peft import load_adapters, save_adapters
from expertmesh.integrations.transformers import (
    ExpertMeshConfig,
    ExpertMeshForCausalLM,
    apply,
)
from expertmesh.models.gpt.config import ModelConfig

SMALL = {"vocab_size": 300, "max_seq_len": 16, "dim": 16, "num_layers": 2, "num_heads": 2, "ffn_hidden_dim": 16}


def gpt(**moe):
    torch.manual_seed(0)
    model = em.GPT(ModelConfig(**SMALL, moe={"hidden_dim": 8, "num_experts": (3,), **moe}), seed=0)
    model.embedding.weight.requires_grad_(False)
    model.layers[1].eval()
    return model


def dense():
    model = em.GPT(ModelConfig(**SMALL, moe={"num_experts": ()}), seed=0)
    model.embedding.weight.requires_grad_(False)
    return model


def adapted():
    model = gpt()
    em.lora.add(model, rank=2, seed=0)
    return model


def door():
    model = ExpertMeshForCausalLM(ExpertMeshConfig(gpt=gpt().config, eos_token_id=[299, 7]), gpt())
    model.generation_config.eos_token_id = [299, 7]
    return model


def blocks():
    def block():
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    return nn.ModuleDict({"a": block(), "b": nn.ModuleDict({"c": block()}), "d": nn.Linear(8, 8)})


def spoiled(folder, change):
    """Adapters of another model of the same sizes, spoiled."""
    save_adapters(adapted(), folder)
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def without_last(config, tensors):
    del tensors[max(tensors)]


def one_more(config, tensors):
    tensors["other"] = torch.zeros(1)


def other_shape(config, tensors):
    tensors[max(tensors)] = torch.zeros(3, 3)


def another_rank(config, tensors):
    config["r"] = 3


def no_rank(config, tensors):
    config["r"] = "many"


def loads(change):
    return lambda model, folder: load_adapters(model, spoiled(folder, change))


def plain(call):
    return lambda model, folder: call(model)


REFUSED = {
    "door: no tokens": (door, plain(lambda m: m.resize_token_embeddings(0)), "new_num_tokens=0"),
    "door: text": (door, plain(lambda m: m.resize_token_embeddings("310")), "new_num_tokens='310'"),
    "door: half": (door, plain(lambda m: m.resize_token_embeddings(310.5)), "new_num_tokens=310.5"),
    "door: no multiple": (door, plain(lambda m: m.resize_token_embeddings(310, 0)), "pad_to_multiple_of=0"),
    "door: too many": (door, plain(lambda m: m.resize_token_embeddings(2**31)), "vocab_size"),
    "door: without the end": (door, plain(lambda m: m.resize_token_embeddings(290)), "leaves no row for eos_token_id"),
    "door: another embedding": (door, plain(lambda m: m.set_input_embeddings(nn.Embedding(3, 16))), "no module to replace"),  # noqa: E501
    "door: another head": (door, plain(lambda m: m.set_output_embeddings(nn.Linear(16, 3))), "no module to replace"),
    "door: positions": (door, plain(lambda m: m.generate(torch.ones(1, 9).long(), max_length=99)), "passes the model's"),  # noqa: E501
    "apply: no experts": (blocks, plain(apply), "no module of experts"),
    "lora: no rank": (gpt, plain(lambda m: em.lora.add(m, rank=0)), "rank=0"),
    "lora: no scale": (gpt, plain(lambda m: em.lora.add(m, alpha=0)), "alpha=0"),
    "lora: other targets": (gpt, plain(lambda m: em.lora.add(m, targets=["w_up"])), "targets="),
    "lora: targets of numbers": (gpt, plain(lambda m: em.lora.add(m, targets=[1, "w_in"])), "targets="),
    "lora: no targets": (gpt, plain(lambda m: em.lora.add(m, targets=3)), "targets=3"),
    "lora: whole numbers": (gpt, plain(lambda m: em.lora.add(m, dtype=torch.int64)), "dtype=torch.int64"),
    "lora: a seed of text": (gpt, plain(lambda m: em.lora.add(m, seed="0")), "seed='0'"),
    "lora: a dense model": (dense, plain(em.lora.add), "targets=experts: experts matches nothing"),
    "lora: twice": (adapted, plain(em.lora.add), "has adapters already"),
    "lora: nothing to merge": (gpt, plain(em.lora.merge), "has no adapters"),
    "lora: nothing to remove": (gpt, plain(em.lora.remove), "has no adapters"),
    "peft: a tensor less": (gpt, loads(without_last), "has no tensor"),
    "peft: a tensor more": (gpt, loads(one_more), "has a tensor other"),
    "peft: another shape": (gpt, loads(other_shape), "has shape"),
    "peft: another rank": (gpt, loads(another_rank), "has shape"),
    "peft: no rank": (gpt, loads(no_rank), "r='many' in adapter_config.json"),
    "peft: no adapters to save": (gpt, lambda m, folder: save_adapters(m, folder), "has no adapters"),
    "upcycle: experts already": (gpt, plain(em.upcycle), "with experts already"),
    "upcycle: every 9th": (dense, plain(lambda m: em.upcycle(m, every=9)), "moe_every"),
    "upcycle: an odd cut": (dense, plain(lambda m: em.upcycle(m, granularity=3)), "granularity=3"),
    "upcycle: an option": (dense, plain(lambda m: em.upcycle(m, capacity_factor=-1.0)), "capacity_factor"),
    "moeify: one of two": (blocks, plain(lambda m: em.moeify(m, names=["a", "d"])), "'d'"),
    "moeify: twice": (blocks, plain(lambda m: em.moeify(m, names=["a", "a"])), "name each block once"),
    "moeify: an option": (blocks, plain(lambda m: em.moeify(m, names=["a"], capacity_factor=-1.0)), "capacity_factor"),
    "parallelize: no config": (gpt, plain(lambda m: em.parallelize(m, {})), "config is a dict"),
}  # fmt: skip


def state_of(model):
    configs = [m.config for m in model.modules() if isinstance(m, em.GPT)]
    outer = getattr(model, "generation_config", None)
    return (
        {name: t.clone() for name, t in model.state_dict().items()},
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        [(name, type(m), m.training) for name, m in model.named_modules()],
        configs,
        None if outer is None else (model.config.to_dict(), outer.to_dict()),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_left(name, tmp_path):
    make, call, match = REFUSED[name]
    model = make()
    before = state_of(model)
    with pytest.raises((ConfigError, CheckpointError), match=match) as caught:
        call(model, tmp_path)
    assert "\n" not in str(caught.value)
    after = state_of(model)
    assert before[1:] == after[1:] and before[0].keys() == after[0].keys()
    for key, tensor in before[0].items():
        assert torch.equal(tensor, after[0][key]), key


def expert():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


DOORS = {
    "tutel": lambda: tutel.moe_layer(
        {"type": "top", "k": 2}, 8, {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 16}
    ),
    "tutel, cosine": lambda: tutel.moe_layer(
        {"type": "cosine_top", "k": 1}, 8, {"type": "llama_ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 16}  # noqa: E501
    ),
    "deepspeed": lambda: DeepSpeedMoE(8, expert(), num_experts=4, use_residual=True),
    "deepspeed, modules": lambda: DeepSpeedMoE(8, nn.Linear(8, 8), num_experts=4),
    "fairseq": lambda: fairseq.MOELayer(fairseq.Top2Gate(8, 4), nn.ModuleList(expert() for _ in range(4))),
}  # fmt: skip


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("change", ["a tensor less", "a tensor more", "another shape"])
@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_loaded_where_a_state_dict_is_refused(door, change, inside):
    model, other = DOORS[door](), DOORS[door]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    if inside:
        model, other = nn.Sequential(model), nn.Sequential(other)
    good = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    bad, last = dict(good), [name for name in good if "experts." in name][-1]
    if change == "a tensor less":
        del bad[last]
    if change == "a tensor more":
        bad[f"{last}_more"] = torch.zeros(1)
    if change == "another shape":
        bad[last] = torch.zeros(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="experts"):
        model.load_state_dict(bad)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.load_state_dict(good)
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    assert all(torch.equal(good[name], tensor) for name, tensor in model.state_dict().items())


def test_nothing_is_written_where_a_folder_of_the_hub_is_refused(tmp_path):
    theirs = tiny_model("mixtral", num_experts=2, top_k=1, vocab_size=300)
    folder = tmp_path / "hub"
    theirs.save_pretrained(folder)
    model = load_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    before = state_of(model)
    with pytest.raises(CheckpointError, match="lm_head.weight has shape"):
        read_into(HubModel(folder), model.state_dict())
    after = state_of(model)
    assert before[1:] == after[1:]
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    there = sorted(p.name for p in tmp_path.rglob("*"))
    for source, words in ((folder, "no tokenizer.json"), (tmp_path / "none", "is no folder")):
        with pytest.raises(ConfigError, match=words):
            convert(source, tmp_path / "new" / "run")
    assert sorted(p.name for p in tmp_path.rglob("*")) == there


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("size", "multiple", "rows"), [(310, None, 310), (300, 64, 320), (None, 7, 301), (257, None, 257), (None, None, 300)]  # noqa: E501
)  # fmt: skip
def test_the_door_has_other_tokens_and_is_saved(size, multiple, rows, tied, tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(**SMALL, tie_embeddings=tied, moe={"hidden_dim": 8})
    model = ExpertMeshForCausalLM(ExpertMeshConfig(gpt=config)).eval()
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        before = model(ids).logits
        found = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        after = model(ids).logits
    assert found is model.get_input_embeddings() and found.weight.shape == (rows, 16)
    assert model.get_output_embeddings().weight.shape == (rows, 16)
    assert model.config.vocab_size == model.config.model.vocab_size == rows == after.shape[-1]
    kept = min(rows, 300)
    oracle = copy.deepcopy(model).double()(ids).logits.detach()
    numerics.assert_two_times(after[..., :kept], before[..., :kept], oracle[..., :kept], what="logits")
    model.save_pretrained(tmp_path)
    again = ExpertMeshForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, after)
    last = torch.full((1, 3), rows - 1)
    loss = again.train()(last, labels=last).loss
    loss.backward()
    assert again.gpt.embedding.weight.grad[rows - 1].any()
    assert again.generate(last, max_new_tokens=2, eos_token_id=None).shape == (1, 5)
