"""Every verb is declared: one parser, help without torch, and each option on a page."""

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.help import help_of
from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.main import VERBS, main
from expertmesh.cli.options import declared_by, options_of
from expertmesh.models.registry import FAMILIES

SOURCE = ROOT / "src"
VERB_MODULES = [*(f"expertmesh.cli.{name}" for name in [*VERBS, "bench_serve"])] + [
    verb.run.partition(":")[0] for verb in FAMILY_VERBS.values()
]


def test_no_module_has_a_parser_of_its_own():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            is_call = isinstance(node, ast.Attribute) and node.attr == "add_argument"
            if is_call or not {"argparse", "tyro"}.isdisjoint(names):
                found.append(str(path))
    assert found == []


@pytest.mark.parametrize("module", VERB_MODULES)
def test_each_option_of_a_verb_has_help(module):
    (kind, *_) = reversed(declared_by(module))
    for option in options_of(kind).values():
        assert option.field.description, option.flag


EVER = {"torch", "numpy", "triton", "transformers", "argparse", "tyro"}
"""Packages that no help imports."""
HEAVY = EVER | {"yaml", "asyncio", "urllib.request", "expertmesh.planner", "expertmesh.costs"}
"""Modules that take 5 ms of a processor and more, and that the help of a verb does without."""
UNLISTED = {"expertmesh.models.registry", "expertmesh_families.swin.recipes"}
"""Modules that know the recipes."""
RECIPES = {"train": set(), "sweep": set(), "train gpt-moe-demo": set()}
RECIPES |= {"train swin-mnist": set()} if "swin" in FAMILIES else {}
NOT_IMPORTED = {
    **dict.fromkeys(["", "--version"], HEAVY | UNLISTED | {"pydantic", "expertmesh.config.base"}),
    **dict.fromkeys([*VERBS, *FAMILY_VERBS, "bench serve"], HEAVY | UNLISTED),
    **{words: HEAVY | more for words, more in RECIPES.items()},
}
"""Modules that the help of a verb must not import, by its words."""


@pytest.mark.parametrize("words", NOT_IMPORTED)
def test_help_imports_little(words):
    code = (
        "import sys; from expertmesh.cli.main import main; "
        f"code = [main([*{words.split()!r}, flag]) for flag in ('--help', '-h')]; "
        f"assert code == [0, 0]; print(*sorted({NOT_IMPORTED[words]!r} & {{*sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stderr.strip() == ""
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:] != ""


def test_each_option_of_a_run_is_on_the_reference():
    page = (Path(ROOT) / "docs" / "reference" / "options.md").read_text()
    sections = {
        option.section
        for family in FAMILIES.values()
        for option in options_of(family.config).values()
        if "." in option.name
    }
    assert len(sections) >= 8
    missing = [
        f"{one.__module__}.{one.__name__}" for one in sections if f"::: {one.__module__}.{one.__name__}\n" not in page
    ]
    assert missing == []


def test_each_option_is_in_a_guide_or_a_recipe():
    """The reference and `--help` are generated, and say what an option is; a guide says what it is for."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/notebooks").glob("*"),
    ]
    pages = [page for page in pages if page.name != "log.md"]
    pages += [*SOURCE.rglob("recipes.py"), *(ROOT / "examples").rglob("*.*")]
    words = {
        word.replace("-", "_").strip("_")
        for page in pages
        for word in re.findall(r"[\w-]+", page.read_text(encoding="utf-8", errors="ignore"))
    }
    kinds = [kind for module in VERB_MODULES for kind in declared_by(module)]
    kinds += [family.config for family in FAMILIES.values()]
    options = [one for kind in kinds for one in options_of(kind).values()]
    options = [one for one in options if not one.spelling.is_word]
    assert len(options) > 300
    names = {one.spelled: {one.spelled.rpartition(".")[2], *one.spelling.also} for one in options}
    assert [spelled for spelled, known in names.items() if not known & words] == []


@pytest.mark.parametrize("width", [60, 80])
def test_wrapped_examples_are_the_same_commands(width):
    def words(text):
        lines = [line for line in text.splitlines() if line.startswith("  ")]
        return shlex.split("\n".join(lines).replace("\\\n", " "), comments=True)

    kinds = [kind for module in VERB_MODULES for kind in declared_by(module)]
    examples = [inspect.cleandoc(kind.__doc__).partition("\n\n")[2] for kind in kinds if kind.__doc__]
    assert sum("torchrun" in one or "curl" in one for one in examples) > 1
    assert [one for one in examples if words(fitted(one, width)) != words(one)] == []


def test_words_below_a_long_name_have_room_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    texts = [help_of(kind) for module in VERB_MODULES for kind in declared_by(module)]
    assert [line for text in texts for line in text.splitlines() if line.startswith(" " * 9)] == []


SHOWN = {
    "train gpt-moe-demo": (["--model.qk-norm BOOL", "--model.sinks  "], ["--model.sinks BOOL"]),
    "serve": (["--compile BOOL", "--expert-fetch-ahead BOOL", "--prefix-caching BOOL"], []),
    "sweep": (["--rates RATE ..."], ["--optim.lr ", "--train.resume", "--dry-run "]),
    "evaluate": (["RUN --tasks FILE ..."], []),
    "experts": (["layer; required by prune"], ["may be repeated"]),
    "plan": (["sequences; --serve needs this or --token-ms", "--set OPTION=VALUE"], []),
    "convert": ([], ["hugging Face"]),
}
SHOWN |= {"classify": (["--drop-policy {first,priority,weight,random}"], [])} if "classify" in FAMILY_VERBS else {}
"""Texts that the help of a verb has, and has not, by its words: a switch that is or may be on takes a value."""


@pytest.mark.parametrize("words", SHOWN)
def test_help_shows_how_an_option_is_given(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main([*words.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = "\n".join(line for line in lines if line.startswith(("usage:", " ")))
    present, absent = SHOWN[words]
    assert [one for one in present if one not in options] == []
    assert [one for one in absent if one in options] == []
