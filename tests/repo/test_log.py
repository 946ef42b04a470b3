"""The log of experiments keeps its form: contents by theme; each entry has a question, a result and a decision, in short lines."""

import re
from pathlib import Path

from tests.support.pages import anchor_of

LOG = Path(__file__).parents[2] / "docs" / "log.md"
PARTS = ["**Question.**", "**Result.**", "**Decision.**"]
LONGEST_LINE = 120


def entries():
    _, *texts = re.split(r"^## ", LOG.read_text(), flags=re.MULTILINE)
    return {text.splitlines()[0]: text for text in texts}


def test_entries_have_the_three_parts_once_and_in_order():
    found = entries()
    assert len(found) > 10
    wrong = {
        title
        for title, text in found.items()
        if re.findall(r"^\*\*\w+\.\*\*", text, re.MULTILINE) != PARTS
    }
    assert wrong == set()


def test_entries_have_a_date_and_the_newest_are_first():
    dates = [re.match(r"\d{4}-\d{2}-\d{2} \S", title) for title in entries()]
    assert all(dates)
    assert [d.group() for d in dates] == sorted(
        (d.group() for d in dates), key=lambda d: d[:10], reverse=True
    )


def test_no_entry_stands_there_twice():
    assert LOG.read_text().count("\n## ") == len(entries())


def test_lines_are_short():
    assert [line for line in LOG.read_text().splitlines() if len(line) > LONGEST_LINE] == []


def test_contents_name_every_entry_once():
    """A new entry gets a line under its theme: `* [Title](#anchor)`, the anchor behind a line break where both are long."""
    contents = LOG.read_text().partition("\n## ")[0]
    named = re.findall(r"^\* \[([^\]]+)\]\(#([^)]+)\)", contents, re.MULTILINE)
    assert sorted(anchor for _, anchor in named) == sorted(map(anchor_of, entries()))
    titles = {anchor_of(title): title[len("2026-11-25 ") :] for title in entries()}
    assert all(titles[anchor] == " ".join(text.split()) for text, anchor in named)
