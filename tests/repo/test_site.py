"""The site of docs/: it has every page, its reference every public name, and it is built strictly where mkdocs is
installed."""

import importlib.util
import re
import subprocess
import sys

import pytest
import yaml
from tests.support.pages import ROOT

DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """What mkdocs reads: names of Python objects in it are left as they are."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def site():
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def leaves(entry):
    if isinstance(entry, str):
        return [entry]
    entries = entry if isinstance(entry, list) else entry.values()
    return [leaf for one in entries for leaf in leaves(one)]


def test_the_menu_has_every_page_once():
    menu = leaves(site()["nav"])
    assert len(menu) == len(set(menu))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    pages = {page for page in pages if not re.match(r"(results|log)/|decisions/\d", page)}
    made = {"index.md", "reference/command_line.md", "repository/CONTRIBUTING.md"}
    made |= {f"notebooks/{path.stem}.md" for path in DOCS.glob("notebooks/*.ipynb")}
    assert set(menu) == pages | made


def test_the_reference_has_every_public_name():
    names = (ROOT / "tests" / "repo" / "public_names.txt").read_text().split()
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    found = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    modules = {"expertmesh.functional", "expertmesh.lora"}
    assert set(names) - modules <= found


def test_nothing_in_the_site_comes_from_elsewhere():
    options = site()
    assert options["theme"]["font"] is False
    scripts = [*options["extra"]["polyfills"], *options["extra_css"]]
    assert all((DOCS / script).is_file() for script in scripts)


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path):
    if importlib.util.find_spec("mkdocstrings") is None or importlib.util.find_spec("material") is None:
        pytest.skip("no mkdocs with material and mkdocstrings (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run([*command, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert loaded == [], page
