"""The code of pages for users runs: the blocks of a section one after the other, in one namespace."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("extending.md", "integrations.md", "migrate.md")
SECTIONS = {
    f"{page}: {title}": text
    for page in PAGES
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.M | re.S)
}


@pytest.mark.parametrize("title", list(SECTIONS))
def test_recipe(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"^<!-- not run: [^\n]+ -->\n```.*?^```", "", SECTIONS[title], flags=re.M | re.S)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks or not title.startswith("extending.md"), f"{title}: there is nothing to run"
    names = {"__name__": "recipe"}
    for block in blocks:
        exec(compile(block, title, "exec"), names)


def test_the_recipe_of_a_hub_family_is_the_whole_file():
    file = DOCS.parent / "src/expertmesh/checkpoints/hub/families/dots1.py"
    code = file.read_text().partition('"""\n\n')[2]
    assert code and f"```python\n{code}```" in SECTIONS["extending.md: A family of the hub"]
