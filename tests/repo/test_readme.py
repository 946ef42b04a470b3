"""The Python of the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_an_example():
    assert any("MoELayer" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_example_runs(block: str):
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
