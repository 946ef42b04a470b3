"""Pages that `make docs` adds to those of docs/ (a hook of mkdocs.yml), and links that lead from one to another.

The README is the first page. Notebooks, the help of the command line, and every file of the repository that a page
links to become pages, so that the site has no link to elsewhere.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FENCES = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINKS = re.compile(r"(\]\(|^\[[^\]\n]+\]: )([^)#\s]+)", re.MULTILINE)
VERBS = re.compile(r"^  ([a-z]+) {2,}", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
PICTURES = (".png", ".svg")
TEXT = "text/plain"


def place_of(path):
    """Where a file of the repository stands in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        place = path.relative_to(DOCS).as_posix()
        return place.removesuffix(".ipynb") + ".md" if path.suffix == ".ipynb" else place
    place = "repository/" + path.relative_to(ROOT).as_posix()
    return place if path.suffix in (".md", *PICTURES) else f"{place}.md"


def file_of(place):
    """The file of the repository that a page was made of."""
    if place == "index.md":
        return ROOT / "README.md"
    notebook = (DOCS / place).with_suffix(".ipynb")
    if notebook.is_file():
        return notebook
    if place.startswith("repository/"):
        path = ROOT / place.removeprefix("repository/")
        return path if path.is_file() else path.with_suffix("")
    return DOCS / place


def outside_fences(text, change):
    """Text with `change` of all that is no block of code."""
    return "".join(part if part.startswith("```") else change(part) for part in FENCES.split(text))


def targets_of(path, text):
    """Files of the repository that a page links to."""
    found = []
    outside_fences(text, lambda part: found.extend(LINKS.findall(part)) or part)
    paths = [(path.parent / target).resolve() for _, target in found if "://" not in target]
    return [target for target in paths if target.is_file()]


def notebook_page(path):
    """A notebook as Markdown: its texts, its code, and what it printed when it was saved."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {TEXT: output.get("text", "")})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="What the cell shows" src="data:image/png;base64,{png}">')
            elif TEXT in data:
                shown = "".join(data[TEXT]).rstrip()
                parts.append(f"``` {{ .text .output }}\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def command_line_page():
    """What `--help` of every verb says."""

    def help_of(*words):
        environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "expertmesh", *words, "--help"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    overview = help_of()
    verbs = VERBS.findall(overview.partition("verbs:")[2].partition("\n\n")[0])
    parts = ["# Command line", f"```text\n{overview}\n```"]
    verbs.insert(verbs.index("bench") + 1, "bench serve")
    parts += [f"## {verb}\n\n```text\n{help_of(*verb.split())}\n```" for verb in verbs]
    return "\n\n".join(parts) + "\n"


def page_of(path):
    """The Markdown of a file of the repository that is no page of docs/."""
    if path.suffix == ".ipynb":
        return notebook_page(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    fence = "`" * 4
    code = f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
    return f"---\nsearch:\n  exclude: true\n---\n\n{code}"


def on_files(files, config):
    """Adds the README, notebooks, the command line, and what pages link to, and so on from there."""
    files.append(File.generated(config, "reference/command_line.md", content=command_line_page()))
    to_read = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.ipynb"))]
    to_read += [DOCS / file.src_uri for file in files.documentation_pages() if not file.generated_by]
    seen = set()
    while to_read:
        path = to_read.pop()
        if path in seen:
            continue
        seen.add(path)
        place = place_of(path)
        if path.suffix in PICTURES:
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=path.read_bytes()))
            continue
        text = page_of(path)
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=text))
        if path.suffix in (".md", ".ipynb"):
            to_read += targets_of(path, text)
    for file in [*files]:  # sources of notebooks; the pages made of them are what is shown
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
    return files


def on_page_markdown(markdown, page, **_):
    """Links to files of the repository become links to their pages."""
    here, source = page.file.src_uri, file_of(page.file.src_uri)

    def change(match):
        target = (source.parent / match[2]).resolve()
        if "://" in match[2] or not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        return match[1] + posixpath.relpath(place_of(target), posixpath.dirname(here) or ".")

    return outside_fences(markdown, lambda part: LINKS.sub(change, part))
