"""Every row of docs/migrate-finetuning.md: its value and default here by a resolved run, its name and default there by
TRL and peft."""

import dataclasses
import re
from operator import attrgetter
from pathlib import Path

import pytest

from expertmesh.cli.flags import parse_run_config
from expertmesh.config.peer_options import ABSENT, PEER_OPTIONS
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.recipes import finetune

PAGE = Path(__file__).parents[2] / "docs" / "migrate-finetuning.md"
WITH = {
    "TRL: DPOConfig": "--objective.name dpo",
    "TRL: GRPOConfig": "--objective.name grpo --reward.functions number",
    "peft: LoraConfig": "--adapter.kind lora",
}
"""Words that go with all rows of a table."""


def rows_of(section):
    """Rows of a section's table, cut into cells."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert rows, section
    return rows


SECTIONS = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
ROWS = [(section, *row) for section in SECTIONS[:-1] for row in rows_of(section)]
NAMES = [row[:2] for row in ROWS]


def quoted(cell):
    """The first text in quotes, or None."""
    return next(iter(re.findall("`([^`]+)`", cell)), None)


def plain(value):
    """A value as numbers and texts compare."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value).lower()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder that is named in the place of a recipe; options are resolved before its model is read."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text("{}")
    return folder


def option_of(words):
    """Dotted name of the last option of a row, and its values."""
    at = max(i for i, word in enumerate(words) if word.startswith("--"))
    return words[at][2:].replace("-", "_"), words[at + 1 :]


def resolved(base, name, words):
    """Value of an option where a run is begun with words."""
    place = ["--data.path", "chats.jsonl"] if name != "data.path" else []
    config = parse_run_config([str(base), *place, *words, "--dry-run"]).config
    section, leaf = name.rsplit(".", 1)
    found = attrgetter(section)(config)
    return getattr(found, f"resolved_{leaf}", getattr(found, leaf))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1].strip('`')}")
def test_the_right_side_is_what_a_run_resolves(row, base):
    section, _, _, here, default = row
    more = WITH.get(section, "").split()
    words = quoted(here).split()
    name, values = option_of(words)
    found = resolved(base, name, [*more, *words])
    assert plain(found) in (plain(values), plain(values[0])), (found, values)
    if (claimed := quoted(default)) and not claimed.startswith("--"):
        lora = ["--adapter.kind", "lora"] * ("adapter.kind lora" in here)
        usual = finetune(str(base)) if name == "data.path" else None
        is_usual = usual.data.path if usual else resolved(base, name, [*more, *lora])
        assert plain(is_usual) == plain(claimed)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name[0]}: {name[1].strip('`')}")
def test_a_name_of_theirs_answers_with_ours(name, base):
    (row,) = (one for one in ROWS if one[:2] == name)
    theirs, (ours, _) = quoted(name[1]), option_of(quoted(row[3]).split())
    ours = {"optim.warmup_ratio": "optim.warmup"}.get(ours, ours)
    for spelled in (theirs, theirs.replace("_", "-")):
        with pytest.raises(ConfigError) as error:
            parse_run_config([str(base), f"--{spelled}", "1"])
        said = str(error.value)
        shared = {"objective.loss": "loss", "optim.lr": "optim.lr"}
        assert shared.get(ours, ours.replace("_", "-")) in said.replace("_", "-"), said
        assert "\n" not in said
    with pytest.raises(ConfigError, match=ours.replace("_", "[_-]")):
        finetune(str(base)).updated({theirs: 1})


ABSENT_ROWS = {name: row[1] for row in rows_of(SECTIONS[-1]) for name in re.findall("`([a-z_]+)`", row[0])}


def test_what_has_no_option_is_what_the_command_line_knows():
    assert ABSENT_ROWS.keys() == ABSENT.keys()
    assert not ABSENT.keys() & PEER_OPTIONS.keys()


@pytest.mark.parametrize("theirs", ABSENT)
def test_what_has_no_option_says_what_to_do(theirs, base):
    begun = r"leave|give prompt|write the|use "
    with pytest.raises(ConfigError, match=f"unknown option --{theirs}; ({begun})"):
        parse_run_config([str(base), f"--{theirs}", "1"])
    with pytest.raises(ConfigError, match=f"{theirs}=1: .*({begun})"):
        finetune(str(base)).updated({theirs: 1})


def test_options_in_the_table_of_names_exist():
    config = finetune("x")
    for ours in PEER_OPTIONS.values():
        attrgetter(ours)(config)


def test_names_and_defaults_of_trl_and_peft():
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    for section, theirs, default, *_ in ROWS:
        system, _, config = section.partition(": ")
        if not config:
            continue
        fields = {f.name: f for f in dataclasses.fields(getattr({"TRL": trl, "peft": peft}[system], config))}
        field = fields[quoted(theirs)]
        if (claimed := quoted(default)) is None:
            continue
        usual = field.default
        if usual is dataclasses.MISSING:
            usual = field.default_factory()
        if quoted(theirs) == "bf16":
            usual = True  # where it is None and there is no fp16
        usual = usual[0] if isinstance(usual, list) else getattr(usual, "value", usual)
        assert plain(usual) == plain(claimed), (section, theirs, usual)


def test_names_of_trl_without_an_option_exist():
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    configs = (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, peft.LoraConfig)
    known = {f.name for config in configs for f in dataclasses.fields(config)}
    others = {"train_on_inputs", "chat_template", "base_model", "model_name", "model_name_or_path"}
    others |= {
        "full_finetuning",
        "flash_attention",
        "lora_target_experts",
    }  # axolotl's and unsloth's
    assert ABSENT.keys() - others <= known, ABSENT.keys() - others - known
