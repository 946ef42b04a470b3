"""An empty text, as from an unset variable of a shell, is no value: of no option, on no verb, nor in Python."""

import pytest

import expertmesh as em
from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.main import main
from expertmesh.config.base import expanded
from expertmesh.config.engine import EngineConfig
from expertmesh.config.server import ServerConfig
from expertmesh.errors import ConfigError

RULE = "must not be empty; give a value"
WORDS = [
    ["train", "gpt-moe-test", "--data.path", "text.txt", "--data.path", "BLANK"],
    ["train", "gpt-moe-test", "--data.path=BLANK"],
    ["train", "gpt-moe-test", "--data.path", "a", "BLANK"],
    ["train", "gpt-moe-test", "--train.run-dir", "BLANK"],
    ["train", "gpt-moe-test", "--train.trackers", "BLANK"],
    ["serve", "runs/x", "--model-name", "BLANK"],
    ["serve", "runs/x", "--allow-origin", "BLANK"],
    ["serve", "runs/x", "--host", "BLANK"],
    ["generate", "runs/x", "--input", "BLANK"],
    ["generate", "runs/x", "--output", "BLANK", "a"],
    ["generate", "runs/x", "--adapter", "BLANK", "a"],
    ["generate", "BLANK", "a"],
    ["report", "BLANK"],
    ["report", "runs/x", "--page", "BLANK"],
    ["export", "runs/x", "--output", "BLANK"],
    ["convert", "--from", "BLANK", "--to", "x"],
    ["convert", "BLANK", "--to", "x"],
    ["quantize", "runs/x", "--to", "BLANK", "--format", "int8"],
    ["quantize", "runs/x", "--to", "x", "--format", "int8", "--calibration", "BLANK"],
    ["experts", "prune", "BLANK", "--keep", "2", "--to", "x"],
    ["evaluate", "runs/x", "--tasks", "BLANK"],
]
CALLS = [
    lambda: em.recipe("gpt-moe-test", {"data.path": ("a", "")}),
    lambda: em.recipe("gpt-moe-test", {"data.path": ""}),
    lambda: em.recipe("gpt-moe-test", {"train.run_dir": " "}),
    lambda: em.recipe("gpt-moe-test", {"distill.teacher": ""}),
    lambda: ServerConfig(model_name=""),
    lambda: ServerConfig(allow_origin=("http://a", "")),
    lambda: EngineConfig(device=""),
    lambda: em.load(""),
    lambda: em.Engine(""),
    lambda: expanded(""),
]
if "translate" in FAMILY_VERBS:
    WORDS.append(["translate", "runs/x", "--to", "BLANK", "a"])
    CALLS.append(lambda: em.recipe("translate-multi30k", {"data.path": ("",)}))
if "classify" in FAMILY_VERBS:
    WORDS.append(["classify", "runs/x", "a.png", "--picture", "BLANK"])
    CALLS.append(lambda: em.recipe("swin-test", {"data.cache_dir": ""}))


@pytest.mark.parametrize("blank", ["", " ", "\t"])
@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words))
def test_no_verb_takes_it(capsys, words, blank):
    assert main([word.replace("BLANK", blank) for word in words]) == 2
    error = capsys.readouterr().err
    assert RULE in error and error.count("\n") == 1, error


@pytest.mark.parametrize("call", CALLS)
def test_python_takes_it_neither(call):
    with pytest.raises(ConfigError, match=RULE):
        call()
