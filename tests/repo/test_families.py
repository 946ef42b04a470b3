"""A family is a folder, its parameters are written once, and a task is small: counted."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from expertmesh.models.builder import ModelBuilder
from expertmesh.models.task import Task

SOURCE = Path(__file__).parents[2] / "src"
FAMILIES = {
    path.parent.name: path.parent
    for folder in ("expertmesh/models", "expertmesh_families")
    for path in (SOURCE / folder).glob("*/family.py")
}
"""Folders of the families by name: the core's, and those of the package beside it, which may be absent."""
FILES = {"config", "spec", "recipes", "costs", "family", "builder", "task", "model"}
"""What each family's folder has."""
DOORS = {
    "checkpoints",  # folders of the hub are GPTs, whatever wrote them
    "integrations",
    "planner",  # plans GPTs
    "rl",  # GPTs write what is rewarded
    "runs",  # opens folders of the hub
    "__init__.py",  # em.GPT
}
"""Places of the core that know GPTs, because other projects' models and files become one."""
OF_THE_HUB = SOURCE / "expertmesh" / "checkpoints" / "hub" / "families"
"""Files named after architectures of the hub, whatever family of ours those are."""
MOST_METHODS = 12
MOST_PLACES = 2


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def folders_of(family):
    """Folders of both packages in which somebody imports a module of the family."""
    inside = ".".join(FAMILIES[family].relative_to(SOURCE).parts) + "."
    return {
        path.relative_to(SOURCE).parts[1]
        for path in SOURCE.rglob("*.py")
        if any(f"{name}.".startswith(inside) for name in imports_of(path))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_folder(family):
    assert {path.stem for path in FAMILIES[family].glob("*.py")} >= FILES
    known = folders_of(family)
    assert known - (DOORS if family == "gpt" else set()) == {"models" if family == "gpt" else family}
    others = "|".join(FAMILIES)
    stray = [
        path
        for path in SOURCE.rglob("*.py")
        if re.search(rf"(^|_)({others})($|_)", path.stem) and path.parent not in {*FAMILIES.values(), OF_THE_HUB}
    ]
    assert stray == []


@pytest.mark.parametrize("family", FAMILIES)
def test_two_places_know_the_projections_of_attention(family):
    """The module that has the matrix, and the spec that says all else of it."""
    models = SOURCE / "expertmesh" / "models"
    inside = [*FAMILIES[family].glob("*.py")]
    inside += [models / "attention.py"] if family in ("gpt", "seq2seq") else []
    of_families = {models, *FAMILIES.values()}
    others = [path for path in SOURCE.rglob("*.py") if of_families.isdisjoint(path.parents)]
    spelled = [path for path in [*inside, *others] if re.search(r"\bqkv(\.|\b *=)", path.read_text())]
    assert 0 < len(spelled) <= MOST_PLACES, spelled


@pytest.mark.parametrize("part", [Task, ModelBuilder])
def test_what_a_family_writes_has_few_methods(part):
    methods = [n for n, f in vars(part).items() if inspect.isfunction(f) and not n.startswith("_")]
    assert 0 < len(methods) <= MOST_METHODS, methods
