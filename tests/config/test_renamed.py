"""Former names of options are read wherever a user may have them, and each is said in one line, once."""

import json
import logging

import pytest
import torch

from expertmesh import MoELayer
from expertmesh.cli.flags import parse_run_config
from expertmesh.config import renamed
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.experts.tuning_cache import load_plans, save_plans

SAID = "shadow_experts is called {0}replicated_experts now; both are read"


@pytest.fixture(autouse=True)
def said(caplog):
    """The lines that were said."""
    renamed._say.cache_clear()
    caplog.set_level(logging.WARNING, logger="expertmesh.config")
    return lambda: [record.getMessage() for record in caplog.records]


def as_word(tmp_path):
    return parse_run_config(["gpt-moe-test", "--parallel.shadow-experts", "2"]).config


def in_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("parallel: {shadow_experts: 2}\n")
    return parse_run_config(["gpt-moe-test", "--config", str(tmp_path / "run.yaml")]).config


def in_a_saved_run(tmp_path):
    config = RECIPES["gpt-moe-test"]()
    values = config.model_dump(mode="json")
    values["parallel"]["shadow_experts"] = 2
    del values["parallel"]["replicated_experts"]
    return type(config).model_validate_json(json.dumps(values))


def as_a_change(tmp_path):
    return RECIPES["gpt-moe-test"]().updated({"parallel.shadow_experts": 2})


@pytest.mark.parametrize("read", [as_word, in_a_file, in_a_saved_run, as_a_change])
def test_a_run_reads_the_former_name(read, tmp_path, said):
    assert read(tmp_path).parallel == ParallelConfig(replicated_experts=2)
    (line,) = said()
    section = "" if read is in_a_saved_run else "parallel."
    assert line == section + SAID.format(section)
    read(tmp_path)
    assert len(said()) == 1, "it is said once"


def test_python_reads_the_former_name(said):
    assert ParallelConfig(shadow_experts=3) == ParallelConfig(replicated_experts=3)
    assert DispatchOptions(shadow_experts=3) == DispatchOptions(replicated_experts=3)
    assert said() == [SAID.format("")]


def test_today_s_name_says_nothing(said):
    ParallelConfig(replicated_experts=1)
    DispatchOptions(replicated_experts=1)
    parse_run_config(["gpt-moe-test", "--parallel.replicated-experts", "2"])
    assert said() == []


@pytest.mark.parametrize("kind", [ParallelConfig, DispatchOptions])
def test_both_names_are_refused(kind):
    with pytest.raises(
        ConfigError,
        match="shadow_experts=1: is a former name, and is given beside replicated_experts; leave it out",
    ):
        kind(shadow_experts=1, replicated_experts=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.shadow_experts": 1, "parallel.replicated_experts": 2},
        {"parallel.replicated_experts": 2, "parallel.shadow_experts": 1},
        {"parallel": {"shadow_experts": 1, "replicated_experts": 2}},
        {"parallel": {"shadow_experts": 1}, "parallel.replicated_experts": 2},
    ],
    ids=str,
)
def test_both_names_in_a_change_are_refused(changes):
    with pytest.raises(
        ConfigError,
        match=r"^parallel\.shadow_experts=1: is a former name, and is given beside parallel\.replicated_experts; "
        r"leave it out$",
    ):
        RECIPES["gpt-moe-test"]().updated(changes)


def test_a_call_of_a_layer_reads_the_former_name(said):
    layer = MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0)
    x = torch.randn(5, 8)
    assert torch.equal(layer(x, shadow_experts=0)[0], layer(x)[0])
    assert said() == [SAID.format("")]
    with pytest.raises(ConfigError, match="replicated_experts=2: this layer is on one process"):
        layer(x, shadow_experts=2)


def test_settled_plans_on_disk_are_read_by_the_former_name(tmp_path, said):
    path, way = tmp_path / "plans.json", DispatchOptions(2, 1, "flat", 1)
    save_plans(path, {"a bucket": way}, "a model")
    path.write_text(path.read_text().replace("replicated_experts", "shadow_experts"))
    assert load_plans(path, "a model") == {"a bucket": way}
    assert said() == [SAID.format("")]
