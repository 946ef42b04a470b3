"""A docstring begins with its thing: the countable half of how sentences are written."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.help import help_of
from expertmesh.cli.main import VERBS, help_text
from expertmesh.cli.options import declared_by, options_of
from expertmesh.models.registry import FAMILIES

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


HOUSE = re.compile(
    r"\b(told|theirs|(?<!-)ahead|silent|at most (?=[;.,(]|$)|of the draws|way of|ways to say|travels?|says? not|says "
    r"of|"
    r"begins? with no|as the hub has|folder of the hub|let it lie|whoever|so many|neighbouring ranks|what is given|"
    r"rests? under|resting|left aside|is said of|(are|is) asked|what else is in)\b|"
    r", at most\b",
    re.I,
)
"""Words of a writer who knows the house, where the field has a term."""
OF_ERRORS = (
    "ConfigError",
    "FieldError",
    "CheckpointError",
    "require",
    "refuse_idle",
    "must",
    "Fix",
)
"""Calls whose texts users read."""


def texts_of_errors(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string inside a call that makes an error."""
    for call in ast.walk(tree):
        name = getattr(getattr(call, "func", None), "attr", None)
        name = name or getattr(getattr(call, "func", None), "id", "")
        if isinstance(call, ast.Call) and name in OF_ERRORS:
            for one in ast.walk(call):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.lineno, one.value


OF_PAGES = re.compile(rf"(?!travel|at most|, at most|ahead|silent)(?:{HOUSE.pattern})", re.I)
"""Words that pages do not have either; tokens travel, and a page may say at most how many."""


def test_pages_are_in_the_terms_of_the_field():
    pages = [*(SOURCE.parent / "docs").glob("*.md"), *SOURCE.parent.glob("*.md")]
    found, count = [], 0
    for path in sorted(pages):
        if path.name in ("log.md", "CHANGELOG.md"):  # as they were written
            continue
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        count += 1
        for line in text.splitlines():
            if words := OF_PAGES.search(line):
                found.append(f"{path.name}: {words[0]!r} in {line.strip()[:100]!r}")
    assert count > 30
    assert not found, "\n".join(found)


def test_errors_are_in_the_terms_of_the_field():
    found, count = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text in texts_of_errors(ast.parse(path.read_text())):
            count += 1
            if words := HOUSE.search(text):
                found.append(f"{path.relative_to(SOURCE)}:{line}: {words[0]!r} in {text[:60]!r}")
    assert count > 2000
    assert not found, "\n".join(found)


def helps() -> dict[str, str]:
    """Help of each verb, and of the training of each family, on a wide terminal."""
    modules = {f"expertmesh.cli.{name}" for name in [*VERBS, "bench_serve"]}
    modules |= {verb.run.partition(":")[0] for verb in FAMILY_VERBS.values()}
    texts = {"": help_text()}
    for module in sorted(modules):
        texts |= {kind.__name__: help_of(kind) for kind in declared_by(module)}
    for family in FAMILIES.values():
        texts[family.name] = help_of(family.config, options_of(family.config))
    return texts


DOTTED = re.compile(r"(?<![-.\w])(model|data|train|optim|parallel|objective|rl|distill)\.[a-z_.]+(?![\w=.])")
"""Option as a field is named: help has that only of an option that the verb does not have."""


def test_help_is_in_the_terms_of_the_field(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    found, count = [], 0
    for verb, text in helps().items():
        for line in text.splitlines():
            first, _, rest = line.strip().partition(" ")
            count += first.startswith("--")
            names_itself = "." in first and re.search(rf"(?<!\S){re.escape(first)}(?![\w.-])", rest)
            several = line.count("(default:") > 1 or re.search(r"[;.] [Nn]one: [^;(]*$", line)
            if several or names_itself or HOUSE.search(line) or DOTTED.search(line):
                found.append(f"{verb}: {line.strip()[:160]}")
    assert count > 350
    assert not found, "\n".join(found)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_fits_the_terminal(monkeypatch, columns):
    """A line is wider only where one word, or a command in quotes, cannot be broken."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for verb, text in helps().items():
        for line in text.splitlines():
            is_one = line.count(" ", len(line) - len(line.lstrip())) < 3
            assert len(line) <= columns or is_one or '"' in line or "'" in line, (verb, line)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("bytes of a request, at most", True),
        ("the teacher falls silent", True),
        ("is for weights that rest under adapters", True),
        ("number of answers per prompt", False),
        ("must be at most 1", False),
    ],
)
def test_house_words_are_found(text, is_found):
    assert bool(HOUSE.search(text)) == is_found
