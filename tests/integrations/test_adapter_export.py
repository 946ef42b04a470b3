"""Adapters of a run for others: merged into the hub's format, or as peft's folder, which peft computes alike."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.hub_models import tiny_model
from tests.support.hub_text import chats_file, hub_folder

from expertmesh import lora
from expertmesh.checkpoints import peft_writing
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.peft_folder import WEIGHTS
from expertmesh.checkpoints.source import read_whole
from expertmesh.cli.convert import run as convert_verb
from expertmesh.cli.train import run as train_verb
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.integrations.hub.adapter_folder import check_logits
from expertmesh.integrations.peft import load_adapters, save_adapters
from expertmesh.models.token_losses import token_losses
from expertmesh.runs.run_dir import checkpoint_weights, load_run
from expertmesh.spec.adapter_targets import USUAL

# peft 0.21 asks transformers 5.23 for an attribute by its old name
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    # and warns of patterns for parameters, which it goes by all the same
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base of the hub, and a run with adapters on all of it that have moved far."""
    place = tmp_path_factory.mktemp("adapted")
    base = hub_folder(place / "base", "qwen2_moe")
    chats_file(place / "chats.jsonl", count=20)
    where = ["--train.run-dir", f"{place}/run", "--data.cache-dir", f"{place}/cache"]
    more = ["--adapter.kind", "lora", "--adapter.rank", "6", "--train.no-tensorboard"]
    data = ["--data.path", f"{place}/chats.jsonl", "--train.batch-size", "4", "--optim.lr", "3e-2"]
    assert train_verb([str(base), *where, *data, *more, "--train.steps", "5"]) == 0
    return base, place / "run"


IDS = torch.randint(264, (2, 16), generator=torch.Generator().manual_seed(0))


def logits_of(folder):
    with torch.no_grad():
        return load_pretrained(folder).eval()(IDS).logits_BSV


def test_merged_weights_and_peft_s_folder_give_the_run_s_logits(folders, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base, run = folders
    assert convert_verb(["--from", str(run), "--to", f"{tmp_path}/merged"]) == 0
    words = ["--from", str(run), "--to", f"{tmp_path}/peft", "--adapter-only"]
    assert convert_verb(words) == 0
    count = sum(".lora_A." in name for name in load_file(tmp_path / "peft" / WEIGHTS))
    assert f"{tmp_path}/peft: {count} adapters of {run}" in capsys.readouterr().out
    merged, plain = logits_of(tmp_path / "merged"), logits_of(base)
    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(base)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    dense = [f"mlp.shared_expert.{x}_proj.weight" for x in ("up", "gate", "down")]
    assert values["target_parameters"] == [*dense, *experts]
    assert values["target_modules"] == [f"self_attn.{x}_proj" for x in "qkvo"]
    original = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(original, tmp_path / "peft")
    with torch.no_grad():
        found = theirs.eval()(IDS).logits
        again = theirs.merge_and_unload()(IDS).logits
    for one in (found, again):
        torch.testing.assert_close(one, merged, rtol=1e-4, atol=1e-4)
    assert (merged - plain).abs().max() > 0.1
    ours = load_pretrained(base)
    load_adapters(ours, tmp_path / "peft")
    saved = Checkpoint(load_run(run).checkpoint, prefix="model.")
    for name, one in lora.adapters(ours).items():
        path, _, leaf = name.rpartition(".")
        for factor in "ab":
            expected = read_whole(saved, f"{path}.adapters.{leaf}.{factor}")
            assert torch.equal(getattr(one, factor), expected), name


@pytest.mark.parametrize("layout", ["fused", "per-expert"])
def test_a_turned_layout_is_found(folders, tmp_path, layout):
    """Rank-major factors of experts written expert-major: every expert would get the others' numbers."""
    convert(folders[1], tmp_path / "peft", adapter_only=True, expert_layout=layout)
    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert bool(values["rank_pattern"]) == (layout == "fused")  # vLLM knows one rank and scale
    checkpoint, path = load_run(folders[1]).checkpoint, tmp_path / "peft" / WEIGHTS
    merged, tensors = checkpoint_weights(checkpoint), load_file(path)
    check_logits(checkpoint, merged, served=path.parent)
    for name, b in tensors.items():
        if "experts" in name and name.endswith("lora_B.weight"):
            turned = b.view(len(b), -1, 4).mT.flatten(1) if layout == "fused" else b.flip(1)
            tensors[name] = turned.contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="served logits differ from those of its adapters"):
        check_logits(checkpoint, merged, served=path.parent)


def test_what_has_no_effect_is_refused(folders, tmp_path):
    base, run = folders
    for source, options, said in (
        (base, {"adapter_only": True}, "is a model of the hub, without adapters"),
        (run, {"expert_layout": "per-expert"}, "has no effect without adapter_only"),
        (run, {"adapter_only": True, "dtype": torch.float32}, "adapters are written as they are"),
    ):
        with pytest.raises(ConfigError, match=said):
            convert(source, tmp_path / "none", **options)


def adapted_pair(name, base, place):
    """Our GPT and peft's model with the same adapters, which are not zero."""
    peft = pytest.importorskip("peft")
    model = tiny_model(name)
    model.save_pretrained(base)
    ours = load_pretrained(base)
    lora.add(ours, rank=3, expert_rank=2, alpha=6.0, targets=USUAL, seed=0)
    for one in lora.adapters(ours).values():
        torch.nn.init.normal_(one.b, std=0.1)
    save_adapters(ours, place, base=str(base))
    theirs = peft.PeftModel.from_pretrained(model, place, is_trainable=True)
    return ours, theirs


FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_peft_s(name, tmp_path):
    ours, theirs = adapted_pair(name, tmp_path / "base", tmp_path / "adapters")
    ids = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    losses = (
        token_losses(ours(ids[:, :-1]).logits_BSV, ids[:, 1:]).mean(),
        torch.nn.functional.cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()),
    )
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    # gradients in the form of factors, so that they have peft's names
    found = {
        n: peft_writing.TrainedAdapter(one.a.grad, one.b.grad, one.scaling) for n, one in lora.adapters(ours).items()
    }
    (tmp_path / "gradients").mkdir()
    peft_writing.write_peft_folder(tmp_path / "gradients", ours.config, found, base=None)
    mine = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    together = {
        key.replace(".default", ""): parameter.grad for key, parameter in theirs.named_parameters() if "lora_" in key
    }
    assert mine.keys() == together.keys()
    for key, grad in together.items():
        # one first factor of ours is several equal ones of peft's
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            path, _, end = key.rpartition(".lora_A")
            if end and path.endswith(parts):
                path = path.rpartition(".")[0]
                grad = sum(together[f"{path}.{part}.lora_A{end}"] for part in parts)
        torch.testing.assert_close(mine[key], grad, rtol=1e-3, atol=1e-5)
