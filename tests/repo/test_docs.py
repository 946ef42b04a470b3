"""Pages of documentation: links lead to headings that are there, and the index of decisions is whole."""

import re

from tests.support.pages import ROOT, anchors_of, links_of, pages


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
