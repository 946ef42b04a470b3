"""Every private name of torch that the packages use is listed in docs/private_torch.md, with the files that use it."""

import ast
import re

import pytest
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "private_torch.md"
PARTS = ("expertmesh/cpu", "expertmesh_families")
"""Folders that can be left out, with the rows that they alone need."""


def is_private(name):
    """Whether a dotted name begins at torch and has a part that torch does not promise."""
    parts = name.split(".")
    is_of_torch = re.fullmatch(r"torch(\.\w+)+", name)
    return bool(is_of_torch) and any(re.match(r"_(?!_)", part) for part in parts)


def dotted(node):
    """`a.b.c`; "" where the first part is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *parts[::-1]]) if isinstance(node, ast.Name) else ""


def private_names(tree):
    """Dotted names in attributes, imports and texts such as those of `import_module`."""
    found = set()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            found.add(dotted(node))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.add(node.value)
    return {name for name in found if is_private(name)}


def used():
    """Files of the packages by private name; `.default` and other ends of an operator belong to its name."""
    files = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in private_names(ast.parse(path.read_text())):
            files.setdefault(name.removesuffix(".default"), set()).add(path.name)
    return files


def test_private_names_are_listed_with_their_files():
    rows = re.findall(r"^\| `(torch\.[^`]+)` \| ([^|]+) \| [^|]{20,} \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: set(re.findall(r"(\w+\.py)`", files)) for name, files in rows}
    assert len(listed) == len(rows) > 20
    if not all((ROOT / "src" / part).is_dir() for part in PARTS):
        kept = {path.name for path in (ROOT / "src").rglob("*.py")}
        listed = {name: files & kept for name, files in listed.items() if files & kept}
    assert listed == used()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch._new import thing", "torch._new.thing"),
        ("from torch.utils import _thing", "torch.utils._thing"),
        ("import torch._new as new", "torch._new"),
        ("y = torch.cpu._thing() + 1", "torch.cpu._thing"),
        ("y = torch._C._thing()", "torch._C._thing"),
        ("import_module('torch._new.part')", "torch._new.part"),
        ("torch.nn.Linear(2, torch.__version__)", None),
        ("other._thing(torch.ones(2))", None),
    ],
)
def test_a_private_name_is_found(line, name):
    assert private_names(ast.parse(line)) == ({name} if name else set())
