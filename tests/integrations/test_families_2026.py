"""Every line of the table of families in docs/integrations.md, on a small model of transformers' own class."""

from pathlib import Path

import pytest
import torch
from tests.support.hub_models import MODELS, tiny_model

import expertmesh as em
from expertmesh.checkpoints.hub.find_family import find_hub_family
from expertmesh.errors import ConfigError
from expertmesh.integrations import transformers as door
from expertmesh.integrations.transformers.decoder import TransformersDecoder

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
_LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_QWEN = _LINEAR | {"head_dim": 12, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1}
_INDEXED = MODELS["deepseek_v3"] | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
SMALL = {
    "qwen3_5_moe_text": _QWEN,
    "qwen3_next": _QWEN,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {},
    "glm_moe_dsa": _INDEXED,
    "deepseek_v3": MODELS["deepseek_v3"],
    "minimax": {"intermediate_size": 16, "head_dim": 12},
    "minimax_m2": {"intermediate_size": 16, "head_dim": 12},
    "llama4_text": {"head_dim": 12, "intermediate_size": 16, "interleave_moe_layer_step": 1},
    "nemotron_h": {
        "head_dim": 12,
        "mamba_num_heads": 2,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 20,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def lines():
    block = PAGE.read_text().split("| family | `model_type`")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in block.splitlines()[2:]]
    return {row[1].strip("`"): row[2:] for row in rows}


def model_of(name):
    return tiny_model(name, num_experts=4, top_k=2, **SMALL[name]).eval()


def tokens():
    return torch.randint(3, 60, (1, 10), generator=torch.Generator().manual_seed(4))


def test_every_line_is_run():
    assert lines().keys() == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
def test_experts_on_our_operators(name):
    says, model = lines()[name][0], model_of(name)
    if says.startswith("refused"):
        with pytest.raises(ConfigError, match="or has experts of an older kind"):
            door.apply(model)
        return
    assert says == "trained, generates"
    expected = model(tokens(), labels=tokens())
    model.zero_grad()
    expected.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if ".experts." in n}
    model.zero_grad()
    assert door.apply(model) >= 1 and grads
    found = model(tokens(), labels=tokens())
    found.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    for n, p in model.named_parameters():
        if ".experts." in n:
            torch.testing.assert_close(p.grad, grads[n], rtol=1e-3, atol=1e-4)
    out = model.generate(tokens(), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 14)


@pytest.mark.parametrize("name", SMALL)
def test_the_engine(name):
    says = lines()[name][1]
    if says == "served as a model of ours":
        assert find_hub_family(name)
        return
    model = model_of(name)
    if says.startswith("refused"):
        kind = says.removeprefix("refused: ").replace(" ", "_")
        with pytest.raises(ConfigError, match=kind):
            TransformersDecoder(model)
        return
    assert says == "served"
    expected = model.generate(tokens(), max_new_tokens=6, do_sample=False, eos_token_id=None)
    sampling = em.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    engine = em.Engine(TransformersDecoder(model))
    (found,) = engine.generate([tokens()[0].tolist()], sampling)
    assert list(found.token_ids) == expected[0, 10:].tolist()


@pytest.mark.parametrize("name", SMALL)
def test_models_of_ours(name):
    says = lines()[name][2]
    if says == "refused by name":
        with pytest.raises(ConfigError, match=f"model_type='{name}': .*; run its experts through"):
            find_hub_family(name)
    else:
        assert says == "trained, served" and find_hub_family(name)
