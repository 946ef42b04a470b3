"""The log of experiments keeps its form: a page per theme; each entry has a question, a result and a decision, in few
short lines."""

import re
from pathlib import Path

import pytest
from tests.support.pages import links_of

LOG = Path(__file__).parents[2] / "docs" / "log.md"
PAGES = sorted((LOG.parent / "log").glob("*.md"))
PARTS = ["**Question.**", "**Result.**", "**Decision.**"]
LONGEST_LINE = 120
MOST_LINES = 25


def entries(page):
    _, *texts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    return [(text.splitlines()[0], text) for text in texts]


def test_every_page_is_named_once():
    assert sorted(target for target, _ in links_of(LOG)) == [f"log/{page.name}" for page in PAGES]
    assert "\n## " not in LOG.read_text()


def test_no_entry_stands_there_twice():
    titles = [title for page in PAGES for title, _ in entries(page)]
    assert len(titles) > 100
    assert len(titles) == len({*titles})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_entries_have_their_form(page):
    for title, text in entries(page):
        assert re.match(r"\d{4}-\d{2}-\d{2} \S", title), title
        assert re.findall(r"^\*\*\w+\.\*\*", text, re.MULTILINE) == PARTS, title
        lines = [line for line in text.splitlines()[1:] if line.strip()]
        assert len(lines) <= MOST_LINES, f"{title}: {len(lines)} lines"
        assert [line for line in lines if len(line) > LONGEST_LINE] == [], title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_newest_are_first(page):
    dates = [title[:10] for title, _ in entries(page)]
    assert dates == sorted(dates, reverse=True)
