"""Every family of the hub as a model of ours against transformers: logits, gradients, greedy tokens, names. One row of
the table each.

The truth is transformers in FP64 throughout (`InFP64`). In FP64 all agree to rounding. In FP32 and BF16 the two-times
rule is asked of root mean squares over six models. In FP32 no choice of an expert is closer than rounding is; in BF16
every expert is chosen, since rounding there moves scores by more than any distance between them.
"""

import json
import re
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file
from tests.oracle import numerics
from tests.support.families import FAMILIES, VOCAB, family_model
from tests.support.in_fp64 import InFP64
from transformers import AutoModelForCausalLM

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.integrations.hub import convert, load_pretrained
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.text.tokenizer import train_tokenizer

pytestmark = pytest.mark.parametrize("name", FAMILIES)

DRAWS = 6
NARROW = [(torch.float32, 2), (torch.bfloat16, 4)]
"""Types and the experts per token."""
APART = 1e-4
"""Distance of scores that no rounding of FP32 closes."""
NEW_TOKENS = 64


def saved(model, name, folder):
    """The folder of a model, whose config.json says the name of the family that the hub's files say."""
    model.save_pretrained(folder)
    if name == "kimi_k2":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": name}))
    return folder


def in_fp64(model):
    """The same model of transformers with everything in FP64; to be called within `InFP64`."""
    wide = AutoModelForCausalLM.from_config(model.config, experts_implementation="eager").double()
    wide.load_state_dict(model.state_dict())
    return wide.eval()


def logits_and_gradients(model, ids):
    """Logits, and gradients of their sum, each with a factor of its own; by the names of the model's parameters."""
    found = model(ids)
    logits = found.logits if hasattr(found, "logits") else found.logits_BSV
    logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits.dtype))
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()}


def by_our_names(model, found, folder):
    """Gradients of a model of transformers go through a folder, as weights do."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.zeros_like(p) if found[key] is None else found[key])
    model.save_pretrained(folder)
    state = load_pretrained(folder, dtype=model.dtype).state_dict()
    return state | {"logits": found["logits"]}


def truth_of(model, ids, folder):
    """Logits and gradients by our names, and by how much the closest choice of an expert was decided."""
    with InFP64() as wide:
        exact = in_fp64(model)
        found = logits_and_gradients(exact, ids)
    return by_our_names(exact, found, folder), wide.margin


def test_fp64_is_equal_to_rounding(name, tmp_path):
    model = family_model(name, seed=0, dtype=torch.float32)
    ours = load_pretrained(saved(model, name, tmp_path / "hub"), dtype=torch.float64).eval()
    assert count_parameters(ours.config).total == sum(p.numel() for p in ours.parameters())
    ids = torch.randint(VOCAB, (3, 24))
    truth, _ = truth_of(model, ids, tmp_path / "exact")
    found = logits_and_gradients(ours, ids)
    assert found.keys() == {n for n in truth if not n.endswith("expert_bias_E")}
    for key, value in found.items():
        assert value.any(), key
        numerics.assert_close_fp64(value, truth[key], what=key)


@pytest.mark.parametrize(("dtype", "top_k"), NARROW, ids=str)
def test_narrow_types_are_as_exact_as_transformers(name, dtype, top_k, tmp_path):
    """Of every kind of parameter, the layers taken together."""
    found, draws = defaultdict(list), 0
    for seed in range(2 * DRAWS):
        model = family_model(name, seed=seed, dtype=dtype, top_k=top_k)
        ids = torch.randint(VOCAB, (2, 24))
        truth, margin = truth_of(model, ids, tmp_path / f"exact{seed}")
        if margin < APART:
            continue
        folder = saved(model, name, tmp_path / f"hub{seed}")
        ours = logits_and_gradients(load_pretrained(folder, dtype=dtype).eval(), ids)
        model.set_experts_implementation("eager")
        rival = by_our_names(model, logits_and_gradients(model, ids), tmp_path / f"rival{seed}")
        for key, value in ours.items():
            found[re.sub(r"\.\d+\.", ".", key)].append((value, rival[key], truth[key]))
        draws += 1
        if draws == DRAWS:
            break
    assert draws == DRAWS
    for key, values in found.items():
        numerics.assert_two_times_rms(*zip(*values, strict=True), what=key, dtype=dtype)


def test_greedy_tokens_are_equal(name, tmp_path):
    """Cold, in chunks of 7 tokens, with the prefix kept; all in FP64, where no two logits are as close as rounding."""
    model = family_model(name, seed=0, dtype=torch.float32)
    prompt = torch.randint(VOCAB, (1, 30))
    with InFP64():
        expected = in_fp64(model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )[0, 30:]
    assert len(set(expected.tolist())) > 9
    ours = load_pretrained(saved(model, name, tmp_path), dtype=torch.float64).eval()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    whole, cut = Engine(ours, block_size=8), Engine(ours, token_budget=7, block_size=4)
    found = [one.generate(prompt.tolist(), params)[0] for one in (whole, cut, whole)]
    assert [one.num_cached_tokens > 0 for one in found] == [False, False, True]
    for output in found:
        assert output.token_ids == tuple(expected.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_round_trip_changes_no_bit(name, dtype, tmp_path):
    """Names, types, bits and what config.json says."""
    model = family_model(name, seed=0, dtype=dtype)
    hub = saved(model, name, tmp_path / "hub")
    tokenizer = train_tokenizer(["a few words of some text " * 9], vocab_size=VOCAB)
    tokenizer.save(str(hub / "tokenizer.json"))
    convert(hub, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "again")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("hub", "again"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]) and tensor.dtype == after[key].dtype, key
    how = {"output_loading_info": True, "attn_implementation": "eager"}
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "again", **how)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(VOCAB, (1, 12))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)
