"""Wraps paragraphs and list items of the documentation that have a line of more than 120 characters: part of `make
format`.

Blocks of code, tables, headings and what is short enough stay as they are; spans of code and links are not broken.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
WORD = re.compile(r"(?:`+[^`\n]*`+|\[[^\]\n`]*(?:`[^`\n]*`[^\]\n`]*)*\]\([^)\s]*\)|\S)+")
LIST_ITEM = re.compile(r"( *)([*+-]|\d+\.) +")
MARKUP = re.compile(r"[*+-]$|\d+\.$|#+$|>|\|")
AS_IT_IS = re.compile(r"\s*(\||#|<|!\[|\[[^\]]+\]: |:::|$)")


def wrapped(lines, first, rest):
    """Lines of a paragraph anew: `first` is what the first one begins with, `rest` what the others do."""
    words = WORD.findall(" ".join(line.strip() for line in lines))
    made, line = [], first
    for place, word in enumerate(words):
        begins = line in (first, rest)
        # A word that would be markup at the beginning of a line stays behind the one before it.
        held = place + 1 < len(words) and MARKUP.match(words[place + 1])
        size = len(line) + len(word) + (not begins) + (len(words[place + 1]) + 1 if held else 0)
        if not begins and size > WIDTH and not MARKUP.match(word):
            made.append(line)
            line, begins = rest, True
        line += word if begins else f" {word}"
    return [*made, line]


def blocks_of(text):
    """(lines, whether they are a paragraph or a list item) in the order of the page."""
    fenced, block = False, []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        indented = not block and line.startswith("    ")  # code without a fence
        keeps = fenced or fence or indented or AS_IT_IS.match(line)
        if keeps or LIST_ITEM.match(line):
            if block:
                yield block, True
            block = []
        if keeps:
            yield [line], False
        else:
            block.append(line)
        fenced ^= fence
    if block:
        yield block, True


def wrap(text):
    """A page whose paragraphs are at most `WIDTH` characters wide, where words let them."""
    made = []
    for lines, prose in blocks_of(text):
        if prose and max(map(len, lines)) > WIDTH:
            item = LIST_ITEM.match(lines[0])
            first = item[0] if item else re.match(" *", lines[0])[0]
            body = [lines[0][len(first) :], *lines[1:]]
            lines = wrapped(body, first, " " * len(first))
        made += lines
    return "\n".join(made) + "\n"


def pages():
    """All but docs/results, whose pages programs write."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.parent.name != "results"]


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = wrap(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrapped {page.relative_to(ROOT)}")
