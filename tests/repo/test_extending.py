"""Every recipe of docs/extending.md runs: the blocks of a section one after the other, in one namespace."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))


@pytest.mark.parametrize("title", list(SECTIONS))
def test_recipe(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", SECTIONS[title], re.M | re.S)
    assert blocks, f"{PAGE.name}, section {title}: there is nothing to run"
    names = {"__name__": "recipe"}
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
