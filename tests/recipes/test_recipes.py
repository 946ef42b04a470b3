"""The recipes: complete, torch-free, and of the published sizes."""

import subprocess
import sys

import pytest

from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.models.registry import FAMILIES, recipe

# Sizes as DeepSpeed-MoE prints them (Rajbhandari et al. 2022, tables 1, 3 and 5): the last digit is the rounding.
PUBLISHED_SIZES = {
    "gpt-350m": (0.350, 0.010),
    "gpt-1.3b": (1.3, 0.1),
    "gpt-6.7b": (6.7, 0.1),
    "gpt-350m-moe128": (13.0, 1.0),
    "gpt-1.3b-moe128": (52.0, 1.0),
    "gpt-350m-prmoe": (4.0, 1.0),
    "gpt-1.3b-prmoe": (31.0, 1.0),
    "gpt-350m-mos": (3.5, 0.1),
    "gpt-1.3b-mos": (27.0, 1.0),
}


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_on_the_meta_device_equal_the_exact_count(name: str) -> None:
    config = RECIPES[name]().model
    model = GPT(config, device="meta")
    count = count_parameters(config)
    assert sum(p.numel() for p in model.parameters()) == count.total
    assert count.active <= count.total


def test_python_knows_the_recipes_of_the_command_line() -> None:
    for family in FAMILIES.values():
        for name, function in family.find_recipes().items():
            assert recipe(name) == function()
            assert recipe(name, {"train.steps": 7}).train.steps == 7


def test_a_section_of_changes_leaves_the_rest_of_the_section() -> None:
    dotted = {"train.steps": 7, "model.moe.top_k": 1, "data.path": "a.txt"}
    nested = {"train": {"steps": 7}, "model": {"moe": {"top_k": 1}}, "data.path": "a.txt"}
    assert recipe("gpt-moe-demo", nested) == recipe("gpt-moe-demo", dotted)


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_sizes(name: str) -> None:
    """Within the rounding of the printed number, RMSNorm and no biases included."""
    billions, last_digit = PUBLISHED_SIZES[name]
    total = count_parameters(RECIPES[name]().model).total
    assert abs(total / 1e9 - billions) <= last_digit / 2


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_training_length_and_rates(name: str) -> None:
    """300 billion tokens in batches of 256 to 1024 sequences of 2048, after 375 million tokens of warm-up."""
    config = RECIPES[name]()
    tokens_per_step = config.train.batch_size * config.data.seq_len
    assert abs(config.train.steps * tokens_per_step - 300e9) <= tokens_per_step / 2
    assert abs(config.optim.warmup_steps * tokens_per_step - 375e6) <= tokens_per_step / 2
    assert config.data.seq_len == config.model.max_seq_len == 2048
    published_min_lr = {"gpt-350m-moe128": 2e-6, "gpt-1.3b-moe128": 1e-6, "gpt-1.3b": 2e-5}
    if name in published_min_lr:
        assert config.optim.lr * config.optim.min_lr_ratio == pytest.approx(published_min_lr[name])


@pytest.mark.parametrize("name", ["gpt-350m-prmoe", "gpt-1.3b-prmoe"])
def test_pyramid_residual_has_more_experts_in_the_last_two_layers(name: str) -> None:
    model = RECIPES[name]().model
    counts = [count for count in model.experts_per_layer() if count]
    assert len(counts) == 12
    assert set(counts[:10]) == {counts[0]}
    assert counts[10:] == [2 * counts[0]] * 2
    assert model.moe.residual


def test_pyramid_residual_saves_what_was_published() -> None:
    """3.2 times fewer parameters at 350M, 1.7 times at 1.3B."""
    for base, saving in (("gpt-350m", 3.2), ("gpt-1.3b", 1.7)):
        full = count_parameters(RECIPES[f"{base}-moe128"]().model).total
        pyramid = count_parameters(RECIPES[f"{base}-prmoe"]().model).total
        assert round(full / pyramid, 1) == saving


def test_dense_twin_spends_the_same_operations() -> None:
    moe, dense = RECIPES["gpt-moe-demo"](), RECIPES["gpt-dense-demo"]()
    ours = forward_flops(moe.model, seq_len=moe.data.seq_len)
    twin = forward_flops(dense.model, seq_len=dense.data.seq_len)
    assert ours.total_flops <= twin.total_flops <= 1.02 * ours.total_flops
    assert twin.experts_flops == twin.router_flops == 0


def test_dense_twin_differs_in_the_feed_forward_layers_alone() -> None:
    moe, dense = RECIPES["gpt-moe-demo"]().model_dump(), RECIPES["gpt-dense-demo"]().model_dump()
    assert moe["data"] == dense["data"]
    assert moe["optim"] == dense["optim"]
    assert [k for k in moe["train"] if moe["train"][k] != dense["train"][k]] == ["run_dir"]
    differing = {k for k in moe["model"] if moe["model"][k] != dense["model"][k]}
    assert differing <= {"moe", "ffn_hidden_dim"}


def test_demo_trains_on_two_million_tokens() -> None:
    config = RECIPES["gpt-moe-demo"]()
    assert config.train.steps * config.train.batch_size * config.data.seq_len >= 2_000_000


def test_one_billion_recipe_is_of_its_size() -> None:
    count = count_parameters(RECIPES["gpt-moe-1b"]().model)
    assert round(count.total / 1e9, 1) == 1.0
    assert round(count.active / 1e9, 1) == 0.2


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_consistent(name: str) -> None:
    config = RECIPES[name]()
    assert config == RECIPES[name]()
    assert type(config).model_validate_json(config.model_dump_json()) == config
    assert config.data.seq_len <= config.model.max_seq_len
    micro = config.train.micro_batch_size or config.train.batch_size
    assert config.train.batch_size % micro == 0
    assert config.train.run_dir == f"runs/{name}"
    group = config.model.moe.routing_group_size
    assert group is None or group % config.data.seq_len == 0


def test_recipes_and_costs_do_not_import_torch() -> None:
    code = (
        "import sys, expertmesh.models.registry, expertmesh.models.gpt.spec, expertmesh.costs.flops,"
        " expertmesh.costs.memory; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
