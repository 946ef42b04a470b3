"""A name says where one is: few classes are called alike, and few files."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MOST_CLASSES, MOST_FILES = 5, 15
FOLDERS_THAT_SAY_WHICH = {
    "models/*": "a model family: its files are called as those of the others, so that they are found without a search",
    "checkpoints/hub/families": "an architecture of the hub: the file is called as transformers calls it",
    "integrations/tutel": "the door of a package: the file is called as the module that it replaces",
    "integrations/tutel/*": "a package inside: the same",
    "cli": "a verb of the command line: the file is called as the verb, which is that of the work that it calls",
}
if (SOURCE / "expertmesh_families").is_dir():
    FOLDERS_THAT_SAY_WHICH["expertmesh_families/*"] = FOLDERS_THAT_SAY_WHICH["models/*"]


def python_files(source):
    files = [path for path in source.rglob("*.py") if path.name[0] != "_"]
    assert files, "no file found: the test looks in the wrong place"
    return files


def in_several(places):
    return {name: where for name, where in places.items() if len(where) > 1}


def files_called_alike(source, exempt=FOLDERS_THAT_SAY_WHICH):
    """Names of files in more than one folder, without those whose folder says which."""
    places = defaultdict(set)
    for path in python_files(source):
        folder = path.parent.relative_to(source)
        if not any(folder.match(pattern) for pattern in exempt):
            places[path.name].add(str(folder))
    return in_several(places)


def classes_called_alike(source):
    """Names of classes, private ones too, in more than one module."""
    places = defaultdict(set)
    for path in python_files(source):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(source)))
    return in_several(places)


def test_few_files_are_called_alike():
    found = files_called_alike(SOURCE)
    assert len(found) <= MOST_FILES, found


def test_few_classes_are_called_alike():
    found = classes_called_alike(SOURCE)
    assert len(found) <= MOST_CLASSES, found


def test_exempt_folders_are_there():
    for pattern in FOLDERS_THAT_SAY_WHICH:
        assert any(path.is_dir() for path in SOURCE.rglob(pattern)), pattern


def test_names_in_two_places_are_found(tmp_path):
    for folder, name, text in (
        ("data", "order", "class Order:\n    class Item: ...\n"),
        ("text", "order", "def order():\n    class Item: ...\n"),
        ("models/gpt", "order", "class Order: ..."),
        ("cli", "text", "class Other: ..."),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    assert files_called_alike(tmp_path) == {"order.py": {"data", "text"}}
    assert {name: len(where) for name, where in classes_called_alike(tmp_path).items()} == {
        "Item": 2,
        "Order": 2,
    }


HOUSE_WORDS = ("told", "way", "theirs", "ahead", "pieces")
MOST_FILES_OF_A_WORD = 5


def files_with_word(source, word):
    """Files in which a function or an argument has the word as a part of its name."""
    found = set()
    for path in python_files(source):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "arg", None) if isinstance(node, ast.arg) else None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
            if word in (name or "").split("_"):
                found.add(str(path.relative_to(source)))
    return found


@pytest.mark.parametrize("word", HOUSE_WORDS)
def test_names_are_words_of_the_field(word):
    found = files_with_word(SOURCE, word)
    assert len(found) <= MOST_FILES_OF_A_WORD, sorted(found)


def test_words_of_the_house_are_found(tmp_path):
    (tmp_path / "a.py").write_text("def who_is_told(way): ...")
    (tmp_path / "b.py").write_text("def toll(*, always): told = 1")
    assert files_with_word(tmp_path, "told") == files_with_word(tmp_path, "way") == {"a.py"}
