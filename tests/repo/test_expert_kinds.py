"""Experts are one module; who asks which kind of module they are is counted."""

import ast

import pytest
from tests.repo.test_design_rules import SOURCE, python_files

MOST_QUESTIONS = 4
ROOTS = ("Module", "ModuleList")


@pytest.fixture(scope="module")
def found():
    """Trees of all files; freed behind this module, or every later collection of garbage would look through them."""
    return {path: ast.parse(path.read_text()) for path in python_files() if SOURCE in path.parents}


def kinds_of_experts(found):
    """Classes of modules, directly or by a class here, that are called experts, in several or in a list of them."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in found.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def is_module(name):
        return name in ROOTS or any(map(is_module, bases.get(name, ())))

    return {n for n in bases if n.endswith(("Experts", "ExpertList")) and is_module(n)}


def name_of(node):
    """A name, or the last one behind dots."""
    return getattr(node, "id", getattr(node, "attr", ""))


def names_in(node):
    return {*map(name_of, ast.walk(node))} - {""}


def questions(tree, kinds):
    """Lines that compare the class of an object with a kind, by its name or by a name of this file for several."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and names_in(node.value) & kinds:
            kinds = kinds | {target.id for target in node.targets if isinstance(target, ast.Name)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1]
        elif isinstance(node, ast.Compare) and any(
            isinstance(one, ast.Call) and name_of(one.func) == "type" for one in (node.left, *node.comparators)
        ):
            asked = node
        elif isinstance(node, ast.MatchClass):
            asked = node.cls
        else:
            continue
        if names_in(asked) & kinds:
            lines.append(node.lineno if hasattr(node, "lineno") else 0)
    return lines


def test_experts_are_one_module_beside_modules_of_the_users(found):
    assert kinds_of_experts(found) == {"GroupedExperts", "ExpertList", "SpreadExpertList"}


def test_few_ask_which_kind_of_experts_a_module_is(found):
    kinds = kinds_of_experts(found)
    asked = {str(path.relative_to(SOURCE)): questions(tree, kinds) for path, tree in found.items()}
    asked = {path: lines for path, lines in asked.items() if lines}
    assert sum(map(len, asked.values())) <= MOST_QUESTIONS, asked
