"""Hub folders as other programs write them: what means nothing is left out, what is of another type is read, and what
is rounded is said."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.oracle import numerics
from tests.support.hub_models import tiny_model
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.text.tokenizer import train_tokenizer
from expertmesh.training.init_from import save_as_run

VOCAB = 300
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER, NORM = "model.layers.0.mlp.gate.weight", "model.norm.weight"
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a few words of some text " * 9], vocab_size=VOCAB)


def folder_of(path, tokenizer, change, *, dtype=torch.float32, **values):
    """A Qwen3-MoE as transformers saves it, its tensors changed, and values of config.json."""
    tied = values.get("tie_word_embeddings", False)
    model = tiny_model("qwen3_moe", num_experts=4, vocab_size=VOCAB, tie_word_embeddings=tied)
    model.to(dtype).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(path / "tokenizer.json"))
    return path, tensors


def both_ways(folder, tmp_path):
    """The model that is read, and that of the run which `convert` makes."""
    convert(folder, tmp_path / "run")
    return [load_pretrained(folder), em.load(tmp_path / "run").model]


def again(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()


def alone(tensors):
    tensors[HEAD] = tensors.pop(EMBEDDING)


def wider(tensors):
    tensors[HEAD] = tensors[EMBEDDING].double()


def buffers(tensors):
    angles = torch.arange(3.0)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = angles.clone()
        tensors[f"model.layers.{layer}.self_attn.masked_bias"] = torch.tensor(-1e4)
        tensors[f"model.layers.{layer}.self_attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["model.rotary_emb.inv_freq"] = angles
    tensors["model.rotary_emb.cos_cached"] = angles.clone()
    tensors["model.embeddings.position_ids"] = torch.arange(8)


@pytest.mark.parametrize("change", [again, alone, wider, buffers])
def test_tensors_that_mean_nothing_are_left_out(tmp_path, tokenizer, change):
    tied = change is not buffers
    folder, tensors = folder_of(tmp_path / "hub", tokenizer, change, tie_word_embeddings=tied)
    expected = tensors[EMBEDDING] if EMBEDDING in tensors else tensors[HEAD]
    for model in both_ways(folder, tmp_path):
        assert torch.equal(model.embedding.weight, expected)
        assert (model.output is None) is tied


def other(tensors):
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def shorter(tensors):
    tensors[HEAD] = tensors[EMBEDDING][1:].clone()


@pytest.mark.parametrize("change", [other, shorter])
def test_two_matrices_where_one_is_tied_are_refused(tmp_path, tokenizer, change):
    folder, _ = folder_of(tmp_path / "hub", tokenizer, change, tie_word_embeddings=True)
    words = "lm_head.weight differs from model.embed_tokens.weight, and config.json ties them"
    with pytest.raises(CheckpointError, match=words):
        load_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    if change is other:  # what the message says helps
        assert load_pretrained(folder).output is not None


def some(names, dtype):
    def change(tensors):
        for name in tensors:
            if any(part in name for part in names):
                tensors[name] = tensors[name].to(dtype) * 1.2345  # digits that BF16 has not

    return change


@pytest.mark.parametrize(
    ("names", "dtype", "of_files", "says"),
    [
        ([".gate.weight"], torch.float32, torch.bfloat16, ""),  # routers are FP32 here, too
        (["norm"], torch.float32, torch.bfloat16, r"norm.weight and \d+ more are rounded"),
        ([NORM], torch.float32, torch.bfloat16, "model.norm.weight is rounded from float32 to"),
        ([DOWN], torch.float16, torch.bfloat16, "rounded from float16 to the bfloat16"),
        ([DOWN], torch.bfloat16, torch.float32, ""),
        ([DOWN, NORM], torch.float16, torch.float32, ""),
        (["layers"], torch.float64, torch.float32, "rounded from float64 to the float32"),
    ],
)
def test_weights_of_several_types_are_read(tmp_path, tokenizer, caplog, names, dtype, of_files, says):
    change = some(names, dtype)
    folder, tensors = folder_of(tmp_path / "hub", tokenizer, change, dtype=of_files)
    caplog.set_level(logging.WARNING, "expertmesh.integrations")
    for model in both_ways(folder, tmp_path):
        assert torch.equal(model.layers[0].moe.router.proj.weight, tensors[ROUTER].float())
        assert torch.equal(model.final_norm.weight, tensors[NORM].to(of_files))
        assert model.layers[1].moe.experts.w_out.dtype == of_files
        w_out = model.layers[1].moe.experts.w_out[2]
        assert torch.equal(w_out, tensors[DOWN].to(of_files))
    if not says:
        assert caplog.messages == []
        return
    assert len(caplog.messages) == 2  # each way says it once
    for message in caplog.messages:
        assert says.partition("norm")[0] in message and "as in transformers; keep them by" in message
    caplog.clear()
    load_pretrained(folder, dtype=of_files)  # who asks for the type knows
    assert caplog.messages == []


def test_without_a_type_in_config_that_of_most_weights_counts(tmp_path, tokenizer):
    change = some([".gate.weight"], torch.float32)
    folder, _ = folder_of(tmp_path / "hub", tokenizer, change, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_pretrained(folder).embedding.weight.dtype == torch.bfloat16


def test_other_types_are_refused(tmp_path, tokenizer):
    folder, _ = folder_of(tmp_path / "hub", tokenizer, lambda t: None, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    for name, value, words in (
        ("dtype", "int8", "dtype=int8 in config.json"),
        ("quantization_config", {"bits": 4}, "quantization_config is set"),
        ("compression_config", {"bits": 4}, "compression_config is set"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(ConfigError, match=words):
            load_pretrained(folder)


def run_of(path, tokenizer, dtype, **moe):
    """A run of no steps, and its model."""
    options = {"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
    config = ModelConfig(**options, moe={"num_experts": (4,), "hidden_dim": 16, **moe})
    model = GPT(config, seed=3, dtype=dtype)
    tokenizer.save(str(path / "given.json"))
    given = {"data": {"seq_len": 16}, "train": {"run_dir": str(path / "run")}}
    files = {"tokenizer.json": path / "given.json"}
    save_as_run(model, GPTRunConfig.model_validate({"model": config, **given}), recipe="test", files=files)
    return path / "run", model


def test_fp64_goes_out_as_fp32_and_that_is_said(tmp_path, tokenizer, caplog):
    run, model = run_of(tmp_path, tokenizer, torch.float64)
    caplog.set_level(logging.WARNING, "expertmesh.integrations")
    convert(run, tmp_path / "hub")
    (message,) = caplog.messages
    assert "float64 weights" in message and message.endswith("written as float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert theirs.dtype == torch.float32
    theirs(torch.arange(9)[None])
    ours = load_pretrained(tmp_path / "hub")
    assert torch.equal(ours.embedding.weight, model.embedding.weight.float())
    caplog.clear()
    convert(run, tmp_path / "half", dtype=torch.bfloat16)
    assert caplog.messages == []


def test_a_folder_of_fp64_is_read(tmp_path, tokenizer):
    """Such as this command wrote one, once."""
    folder, tensors = folder_of(tmp_path / "hub", tokenizer, lambda t: None, dtype=torch.float64)
    for model in both_ways(folder, tmp_path):
        assert torch.equal(model.embedding.weight, tensors[EMBEDDING])


@pytest.mark.parametrize("k", [1, 3])
def test_a_softmax_over_the_chosen_goes_out_as_mixtral(tmp_path, tokenizer, k):
    late = {"score_function": "softmax_after_topk", "top_k": k}
    run, model = run_of(tmp_path, tokenizer, torch.float32, **late)
    convert(run, tmp_path / "hub")
    theirs, wide = (AutoModelForCausalLM.from_pretrained(tmp_path / "hub") for _ in range(2))
    wide = wide.double()
    wide.set_experts_implementation("eager")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    ids = torch.randint(VOCAB, (6, 24))
    with torch.no_grad():
        found = model.eval()(ids).logits_BSV
        numerics.assert_two_times(found, theirs(ids).logits, wide(ids).logits, what="logits")
