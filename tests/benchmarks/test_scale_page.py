"""docs/results/scale.md is what the planner says now."""

from pathlib import Path

import pytest
from benchmarks.markdown import markdown_table

from benchmarks import scale

PAGE = Path(__file__).parents[2] / "docs" / "results" / "scale.md"


@pytest.mark.parametrize("part", ["states", "scaling", "two_hundred_billion", "of_claims"])
def test_the_page_is_current(part):
    assert markdown_table(getattr(scale, part)()) in PAGE.read_text()
