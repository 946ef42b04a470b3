"""A run's adapters on every family: merged, served, and read by peft and as vLLM reads them, they give the same
logits."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.families import FAMILIES, family_model
from tests.support.hub_text import chats_file

from expertmesh import lora
from expertmesh.checkpoints.peft_folder import CONFIG, WEIGHTS
from expertmesh.cli.convert import run as convert_verb
from expertmesh.cli.train import run as train_verb
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.integrations.hub import load_pretrained
from expertmesh.integrations.peft import load_adapters

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.23 for an attribute by its old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

IDS = torch.randint(260, (1, 16), generator=torch.Generator().manual_seed(0))
FUSED = {"experts.base_layer": "gate_up_proj", "experts": "down_proj"}
"""Names of experts' factors, and the parameters that they are of."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return chats_file(tmp_path_factory.mktemp("chats") / "chats.jsonl", count=12)


def base_of(name, folder):
    """A model of transformers, and its folder."""
    model = family_model(name, seed=1, dtype=torch.float32)
    model.config.eos_token_id = byte_tokenizer().token_to_id("<|endoftext|>")
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["model_type"] = name if name == "kimi_k2" else values["model_type"]
    (folder / "config.json").write_text(json.dumps(values))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


def trained(base, chats, place):
    """A run with adapters of one rank, as vLLM wants them, that have moved far."""
    where = ["--train.run-dir", f"{place}/run", "--data.cache-dir", f"{place}/cache"]
    more = ["--adapter.kind", "lora", "--adapter.rank", "3", "--adapter.expert-rank", "3"]
    data = ["--data.path", str(chats), "--train.batch-size", "4", "--optim.lr", "3e-2"]
    more += ["--train.no-tensorboard", "--train.device", "cpu", "--train.dtype", "float32"]
    assert train_verb([str(base), *where, *data, *more, "--train.steps", "2"]) == 0
    return place / "run"


def low_ranks(folder):
    """What an adapter folder adds by module, and the number of experts where it is of all: by vLLM's rules.

    One rank and one scale; the factors of all experts are A (E, r, K), and B (N, r, E), of which the last axis is the
    expert (`_stack_moe_lora_weights` of vllm/lora/model_manager.py).
    """
    values, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    assert not values["rank_pattern"] and not values["alpha_pattern"]
    scale = values["lora_alpha"] / values["r"]
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            E = len(a) // values["r"]
            a_ErK, b_ENr = a.view(E, -1, a.shape[1]), b.view(len(b), -1, E).permute(2, 0, 1)
            yield module, scale * (b_ENr @ a_ErK)


def as_vllm_reads_all_experts(model, folder, name):
    """Logits of transformers' model with what a folder adds to modules and to parameters of all experts."""
    model = copy.deepcopy(model)
    state, added = model.state_dict(), 0
    for module, more_ENK in low_ranks(folder):
        end = next((e for e in FUSED if module.endswith(f"mlp.{e}")), None)
        if end is None:
            state[f"{module}.weight"] += more_ENK[0]
            continue
        weight = state[f"{module.removesuffix(end)}experts.{FUSED[end]}"]
        weight += more_ENK.mT if name == "gpt_oss" else more_ENK
        added += 1
    assert added == 2 * sum(key.endswith("mlp.experts.down_proj") for key in state)
    with torch.no_grad():
        return model(IDS).logits


def as_vllm_reads_each_expert(base, folder, place):
    """Logits of the base's files with what a folder adds to the tensors of these names, which vLLM's tables have."""
    place.mkdir()
    tensors = load_file(base / "model.safetensors")
    for module, more_ENK in low_ranks(folder):
        tensors[f"{module}.weight"] += more_ENK[0]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text((base / "config.json").read_text())
    return logits_of(load_pretrained(place))


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits_BSV


def served(base, folder):
    """Log-probabilities (S - 1,) of the tokens, by the engine."""
    engine = Engine(load_pretrained(base).eval(), adapters={"a": folder})
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (found,) = engine.generate([IDS[0].tolist()], params, adapter="a")
    return torch.tensor([one.logprob for one in found.prompt_logprobs[1:]])


ALIKE = ("olmoe", "deepseek_v2", "moonlight", "kimi_k2", "dots1")
"""Families whose parts others have, which not every run of the tests tries."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if n in ALIKE else ()) for n in FAMILIES],
)
def test_adapters_give_the_same_logits_wherever_they_go(name, chats, tmp_path):
    base = tmp_path / "base"
    model = base_of(name, base)
    run = trained(base, chats, tmp_path)
    for to, words in (
        ("merged", []),
        ("fused", ["--adapter-only"]),
        ("each", ["--adapter-only", "--expert-layout", "per-expert"]),
    ):
        if (name, to) != ("gpt_oss", "each"):  # its files have no tensors of one expert
            assert convert_verb(["--from", str(run), "--to", str(tmp_path / to), *words]) == 0
    ours = load_pretrained(base)
    load_adapters(ours, tmp_path / "fused")
    expected = logits_of(ours)
    plain = logits_of(load_pretrained(base))
    scale = float(plain.abs().max())
    assert (expected - plain).abs().max() > 0.05 * scale
    found = {
        "merged": logits_of(load_pretrained(tmp_path / "merged")),
        "all experts": as_vllm_reads_all_experts(model, tmp_path / "fused", name),
    }
    if name != "gpt_oss":
        found["each expert"] = as_vllm_reads_each_expert(base, tmp_path / "each", tmp_path / "v")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "fused").eval()
    with torch.no_grad():
        found["peft"] = theirs(IDS).logits
    for where, logits in found.items():
        error = float((logits - expected).abs().max()) / scale
        assert error < 2e-5, f"{where}: off by {error:.1e} of the largest"
    logprobs = expected[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(served(base, tmp_path / "fused"), logprobs, rtol=1e-4, atol=1e-4)
    lora.merge(ours)
    torch.testing.assert_close(logits_of(ours), expected, rtol=1e-4, atol=2e-5 * scale)
