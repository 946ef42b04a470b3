"""Parameters of published models, to the parameter, and what is said of folders whose sizes are read from config.json
alone."""

import json
import tomllib
from importlib.resources import files

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import expertmesh as em
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.planner.plan import plan
from expertmesh.planner.published import published_models
from expertmesh.planner.serve import serve_plan

ROWS = tomllib.loads(files("expertmesh.planner").joinpath("published.toml").read_text("utf-8"))["models"]
OF_HUB = [name for name, row in ROWS.items() if "model_type" in row]


def test_all_rows_of_the_hub_have_their_class():
    assert set(ROWS) - set(OF_HUB) == {
        "fairseq-4b",
        "fairseq-1.1t",
        "gpt-1.3b-moe128",
        "gpt-6.7b",
        "gpt-1t-moe128",
        "gpt-2t-moe128",
        "tutel-layer",
    }


@pytest.mark.parametrize("name", OF_HUB)
def test_parameters_are_those_of_transformers(name):
    row = dict(ROWS[name])
    nulls = dict.fromkeys(row.pop("nulls", ()))
    config = AutoConfig.for_model(**row, **nulls)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert published_models()[name].num_parameters == expected


def test_matrices_of_dense_parts_are_not_negative():
    """Biases of routers are no matrices."""
    blocks = published_models()["gpt-oss-20b"].blocks
    assert {block.dense_elements for block in blocks} == {0}
    config = em.recipe("gpt-moe-test").model
    assert all(block.dense_elements >= 0 for block in sizes_of(config).blocks)


CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"model_type": "llama4_text"}, "model_type='llama4_text'"),
    ],
)
def test_what_sizes_leave_out_is_said(tmp_path, change, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change))
    training = plan(str(path), cluster="h100x8")
    serving = serve_plan(str(path), cluster="h100x1", batch=1, context=100)
    for found in (training, serving):
        said = [guess for guess in found.guesses if "config.json alone" in guess]
        assert len(said) == (words is not None)
        assert not said or (words in said[0] and "without biases" in said[0])
