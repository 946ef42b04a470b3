"""The pages of documentation as Markdown: headings and the anchors that links to them have."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchor_of(title):
    """The anchor of a heading, as hosts of git and the site make it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def anchors_of(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {anchor_of(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def pages():
    """What readers read: the README, CONTRIBUTING and all in docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links_of(page):
    """(target, anchor) of the links to pages and headings of this repository; target "" is the page itself."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text)
    found += re.findall(r"^\[[^\]]+\]: ([^#\s]*)(?:#(\S+))?$", text, re.MULTILINE)
    return [(target, anchor) for target, anchor in found if "://" not in target]
