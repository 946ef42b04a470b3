"""A docstring begins with its thing: the countable half of how sentences are written."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FIRST = re.compile(
    r"(What|That|Those|These|This|Which|Whose|Who|How|Where|When|As|It|Its|They|Them|Of|For|To|In|On|By|With|Without|If|One|Ones|"
    r"Nothing|Something|Everything|Anything|Some|Another|Others?|Such|So|Here|There|Most|More|The same|None)\b"
)
"""Words that stand for a thing that is not named yet. "Whether" stays: it is what a boolean says."""
WITHIN = re.compile(r"\b(that of|those of|theirs|that which|those which|of what|to what)\b", re.I)
"""Pronouns whose noun is elsewhere."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of modules, classes, functions and, below them, values."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
        body = getattr(node, "body", None)
        statements = body if isinstance(body, list) else []
        for value, below in zip(statements, statements[1:], strict=False):
            match value, below:
                case (
                    (ast.Assign() | ast.AnnAssign()),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield below.lineno, text


def words_without_a_thing(text: str) -> list[str]:
    """Parts of a docstring that a reader cannot take at once."""
    first = FIRST.match(text)
    return [*([first.group()] if first else []), *WITHIN.findall(text)]


def test_docstrings_begin_with_their_thing():
    found, count = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text())):
            count += 1
            for words in words_without_a_thing(text):
                found.append(f"{path.relative_to(SOURCE)}:{line}: {words!r} in {text[:60]!r}")
    assert count > 4000
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What a step computes.", ["What"]),
        ("That of ranks which wait.", ["That", "That of"]),
        ("Ids of a step, and those of the last.", ["those of"]),
        ("Inputs and outputs of a step.", []),
        ("Whether the rank leads.", []),
        ("Whatever is left.", []),
    ],
)
def test_words_are_found(text, words):
    assert words_without_a_thing(text) == words
