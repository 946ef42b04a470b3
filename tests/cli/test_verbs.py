"""Every verb is declared: one parser, help without torch, and each option on a page."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.main import VERBS
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


@pytest.mark.parametrize(
    "words",
    [[], *([verb] for verb in VERBS), ["bench", "serve"], ["train", "gpt-moe-demo"]],
    ids=str,
)
def test_help_needs_no_torch(words):
    code = (
        "import sys; from expertmesh.cli.main import main; "
        f"code = main([*{words!r}, '--help']); "
        "assert code == 0 and not {'torch', 'tyro', 'argparse'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


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
        f"{one.__module__}.{one.__name__}"
        for one in sections
        if f"::: {one.__module__}.{one.__name__}\n" not in page
    ]
    assert missing == []
