"""An architecture of the hub is one object in one file: of this package, or of an installed one that names it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.packages import write_package
from tests.support.patience import PATIENCE_S

from expertmesh.checkpoints.hub import families
from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.checkpoints.hub.family import PLAIN, option
from expertmesh.checkpoints.hub.find_family import ENTRY_POINTS, FAMILIES, find_hub_family
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub.exports import export_family, origin_of
from expertmesh.models.gpt.config import ModelConfig

FILE = """
from dataclasses import replace
from expertmesh.checkpoints.hub.families.qwen3_moe import QWEN3_MOE

THEIRS = replace(QWEN3_MOE, model_type="theirs", architecture="TheirsForCausalLM")
"""
VALUES = {
    "model_type": "theirs",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a package with an entry point."""

    def install(name, value, text=FILE):
        stem = f"package_of_{name}"
        write_package(tmp_path, stem, {f"{stem}.py": text}, {ENTRY_POINTS: {name: f"{stem}:{value}"}})
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_an_installed_package_adds_one(installed, tmp_path):
    with pytest.raises(ConfigError, match="model_type='theirs': is none"):
        find_hub_family("theirs")
    installed("theirs", "THEIRS")
    family = find_hub_family("theirs")
    config = model_config(VALUES)
    assert family.architecture == "TheirsForCausalLM" and config.qk_norm
    with pytest.raises(ConfigError, match="model_type='others': is none .*mixtral, .*, theirs"):
        find_hub_family("others")
    assert export_family(config).model_type == "qwen3_moe"
    (tmp_path / "hub").mkdir()  # what a run keeps of where its model came from
    (tmp_path / "hub" / "config.json").write_text(json.dumps(VALUES))
    assert origin_of(tmp_path) is family
    assert export_family(config, family) is family
    plain = config.model_copy(update={"qk_norm": False})
    assert export_family(plain, family).model_type == "mixtral"


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("GONE", FILE, "broken:GONE in the entry points .* cannot be imported"),
        ("A", "import a_module_that_is_not_there", "cannot be imported .*a_module_that_is_not"),
        ("THEIRS", FILE, "is no HubFamily of this model_type"),
        ("A", "A = 3", "is no HubFamily of this model_type"),
    ],
)
def test_a_broken_package_is_named(installed, value, text, words):
    installed("broken", value, text)
    sys.modules.pop("package_of_broken", None)
    with pytest.raises(ConfigError, match=f"model_type=broken: .*{words}"):
        find_hub_family("broken")


def test_families_are_known_without_torch():
    code = "import sys, expertmesh.checkpoints.hub.find_family; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_option_of_a_family_is_one_of_ours(family):
    """And each word for a way out is about an option that can be in the way."""
    named = {*PLAIN, *family.fits}
    assert named >= family.ways.keys()
    for name in named:
        option(ModelConfig(), name)


def test_a_file_is_a_family():
    files = {path.stem for path in Path(families.__file__).parent.glob("[a-z]*.py")}
    assert files == FAMILIES.keys()
    assert find_hub_family("kimi_k2") is FAMILIES["deepseek_v3"]
    other = replace(FAMILIES["mixtral"], defaults={})
    assert other.filled({"hidden_act": None})["hidden_act"] == "silu"
