"""Docstrings of internals have few lines beyond the first: half of what 0.2.0's sources had before (10,053)."""

import pytest
from tests.support.pages import ROOT
from tests.support.tools import tool

MOST_LINES = 10_053 // 2


@pytest.fixture(scope="module")
def internal_words():
    return tool("internal_words")


def test_docstrings_of_internals_are_short(internal_words):
    """`python tools/internal_words.py` lists the files with most lines."""
    lines = internal_words.counts(ROOT)
    assert len(lines) > 300
    assert lines.total() <= MOST_LINES


def test_lines_are_counted(internal_words, tmp_path):
    path = tmp_path / "planted.py"
    path.write_text(
        'class Public:\n    """One.\n\n    Two."""\n'
        'def inner():\n    """One.\n\n    Args:\n        x: it.\n    """\n    # why\n    # that\n'
    )
    assert internal_words.lines_beyond_the_first(path, {"Public"}) == 5
