"""Pages of documentation: links lead to headings that are there, and the index of decisions is whole."""

import re

from tests.support.pages import ROOT, anchors_of, links_of, pages
from tools import wrap_docs

LONGEST_ROW = 240
"""Of a table, whose rows cannot be wrapped; longer ones are better as a list."""


def test_anchors_of_links_are_headings():
    broken = [
        f"{page.name}: {target}#{anchor}"
        for page in pages()
        for target, anchor in links_of(page)
        if anchor and target.endswith((".md", ""))
        if anchor not in anchors_of((page.parent / target).resolve() if target else page)
    ]
    assert broken == []


def test_the_index_of_decisions_has_every_title():
    folder = ROOT / "docs" / "decisions"
    index = " ".join((folder / "README.md").read_text().split())
    for page in sorted(folder.glob("[0-9]*.md")):
        number, title = page.read_text().partition("\n")[0][2:].split(": ", 1)
        if number != "NNN":
            assert f"[{number}]({page.name}): {title}" in index, page.name
    assert len(re.findall(r"\* \[\d{3}\]", index)) == len(list(folder.glob("[0-9]*.md"))) - 1


def test_lines_are_short():
    """All but docs/results, whose pages programs write; `make format` wraps paragraphs."""
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in wrap_docs.pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > (LONGEST_ROW if line.startswith("|") else wrap_docs.WIDTH)
    ]
    assert long == []


def test_wrapping_changes_white_space_only_and_no_markup():
    text = (
        "* an item " + "of many words " * 12 + "with `a span of code` and - a dash\n"
        "  [a link](to_a_page.md) " + "after it " * 14 + "\n\n"
        "| a row | " + "of a table " * 20 + "|\n\n```\n" + "code " * 40 + "\n```\n"
    )
    made = wrap_docs.wrap(text)
    assert made.split() == text.split() and wrap_docs.wrap(made) == made
    prose = [line for line in made.splitlines() if not line.startswith(("|", "code"))]
    assert max(map(len, prose)) <= wrap_docs.WIDTH
    assert all(line.startswith(("* an item", "  ", "```")) for line in prose if line)
    assert "`a span of code`" in made and "[a link](to_a_page.md)" in made
    assert not re.search(r"^ *- ", made, re.MULTILINE)
    assert wrap_docs.wrap(indented := "    code " + "of words " * 20 + "\n") == indented
    directive = "::: a.name\n    options:\n      members: [" + "one, " * 30 + "two]\n"
    assert wrap_docs.wrap(directive) == directive
    assert "\n| a row | of a table" in made and "\ncode code" in made


SOURCES = ROOT / "src" / "expertmesh"
OF_EVERY_FAMILY, OF_A_RUN = "models/NAME/", "runs/mine/"
PARTS = {
    "cpu": ("cpu/", "tests/cpu/"),
    "../expertmesh_families": ("expertmesh_families/", "tests/families/"),
}
LEFT_OUT = [one for part, names in PARTS.items() if not (SOURCES / part).is_dir() for one in names]
"""Parts that can be left out, and that are not here."""


def test_source_files_that_pages_name_are_there():
    """With a folder: from the root, or from src/expertmesh. A name alone: of any file. Logs and decisions tell what
    was."""
    kept = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts]
    names = {path.name for path in kept}
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        if page.name != "log.md" and not {"decisions", "log", "results"} & set(page.parts)
        for name in re.findall(r"(?<![\w./-])(?:[\w-]+/)*\w+\.py\b", page.read_text())
        if not name.startswith((OF_EVERY_FAMILY, OF_A_RUN, *LEFT_OUT))
        if ("/" in name or name not in names)
        if not any((folder / name).is_file() for folder in (ROOT, SOURCES, SOURCES.parent))
    ]
    assert missing == []


def test_the_architecture_names_every_folder():
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert {name for name in folders if f"{name}/" not in page} == set()
