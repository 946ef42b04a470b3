"""The code of the README and of all pages in docs/ runs as it stands, from top to bottom, commands with smaller models.

A block that cannot run here says so in the line before it: `<!-- only read: why -->`, whose commands are parsed and
described by `--dry-run`, or `<!-- not run: why -->`. The Python of docs/parallelism.md runs on two ranks
(tests/parallel/test_docs_example.py).
"""

import gzip
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.known_rows import known

from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
RUN_BY_SECTION = ("docs/extending.md", "docs/integrations.md", "docs/migrate.md")
ON_TWO_RANKS = "docs/parallelism.md"
SMALL = ["--train.steps", "2", "--train.dtype", "float32"]
SMALLER = {
    "gpt-moe-demo": "gpt-moe-test",
    "translate-multi30k": "translate-test",
    "RECIPE": "gpt-moe-test",
}
# Runs that a page speaks of and does not train.
TRAINED = {
    "docs/data.md": ["mine"],
    "docs/report.md": ["mine", "other"],
    "docs/finetuning.md": ["mine"],
    "docs/rl.md": ["mine"],
    "docs/checkpoints.md": ["gpt-moe-demo"],
    "docs/integrations.md": ["gpt-moe-demo"],
    "docs/quantization.md": ["gpt-moe-demo"],
    "docs/parallelism.md": ["qwen3"],
}


class Block(NamedTuple):
    kind: str
    text: str
    mark: str


def blocks_of(page):
    pattern = r"(?:<!-- (only read|not run): [^\n]+ -->\n)?^```(\w*)\n(.*?)^```"
    found = re.findall(pattern, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [Block(kind, text, mark) for mark, kind, text in found]


def commands_in(block):
    """The words of each call of our program in a block, those of torchrun among them."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "-m" in words:
            words = words[words.index("-m") + 1 :]
        if words and words[0].endswith("expertmesh"):
            found.append([SMALLER.get(word, word) for word in words[1:]])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all that the pages speak of, and a run of two steps."""
    place = tmp_path_factory.mktemp("first_minutes")
    text = "".join(f"{i} is a number, and its square is {i * i}\n" for i in range(1500))
    (place / "my_text.txt").write_text(text)
    (place / "notes.txt").write_text(text[:9000])
    (place / "books").mkdir()
    for i in range(4):
        (place / "books" / f"{i}.txt").write_text(text.replace("number", f"book {i}"))
    (place / "web").mkdir()
    with gzip.open(place / "web" / "a.jsonl.gz", "wt") as file:
        file.write("".join(f'{{"text": "page {i}, which is one of many"}}\n' for i in range(400)))
    (place / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i} is ", "answer": "{i}"}}\n' for i in range(60)))
    (place / "rewards.py").write_text(
        "def correct(completions, answer, **kwargs):\n"
        "    return [float(said.strip() == right) for said, right in zip(completions, answer)]\n"
    )
    (place / "my_folder").mkdir()
    (place / "models").mkdir()
    for name, lines in (("my_folder/train", 40), ("my_folder/val", 8), ("test", 2)):
        for language, animal in (("en", "dog"), ("de", "Hund")):
            (place / f"{name}.{language}").write_text("".join(f"{animal} {i % 7}\n" for i in range(lines)))
    pairs = "".join(f'{{"prompt": "{i}?", "chosen": "{i * i}", "rejected": "no"}}\n' for i in range(40))
    (place / "pairs.jsonl").write_text(pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.chdir(place)
        words = ["--data.path", "my_text.txt", "--train.run-dir", "trained"]
        assert main(["train", "gpt-moe-test", *SMALL, *words]) == 0
        yield place


def call(words):
    if words[0] == "train":
        words = [*words, *SMALL]
        if words[1] == "translate-test":
            words += ["--train.run-dir", "runs/translate-multi30k"]
    assert main(words) == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, folder, capsys, monkeypatch):
    shutil.rmtree("runs", ignore_errors=True)
    for name in TRAINED.get(page, []):
        shutil.copytree("trained", f"runs/{name}")
    for block in known(blocks_of(page)):
        if block.mark == "only read":
            for words in commands_in(block):
                with monkeypatch.context() as patch:
                    for name in ("RANK", "LOCAL_RANK"):
                        patch.setenv(name, "0")
                    patch.setenv("WORLD_SIZE", "32" if "nnodes" in block.text else "4")
                    if "torchrun" in block.text:
                        patch.setenv("TORCHELASTIC_RUN_ID", "1")
                    assert main([*words, "--train.device", "cpu", "--dry-run"]) == 0
        elif block.mark == "not run":
            continue
        elif block.kind == "sh":
            for words in commands_in(block):
                call(words)
        elif block.kind == "python" and page not in (*RUN_BY_SECTION, ON_TWO_RANKS):
            exec(compile(block.text, page, "exec"), {"__name__": "page"})
        assert "error: " not in capsys.readouterr().err


def test_every_block_has_a_kind_that_runs_or_is_no_code():
    """Commands and Python stand in blocks that say so, not in plain or indented ones."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert {block.kind for block in blocks_of(page)} <= {"", "sh", "python", "yaml", "sql"}, page
        plain = [block.text for block in blocks_of(page) if block.kind == ""]
        fenced = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        plain += re.findall(r"^    .*$", fenced, re.MULTILINE)
        code = [t for t in plain if re.search(r"^\s*(\S*expertmesh|torchrun|import|from) ", t, re.M)]
        assert code == [], page
        assert text.count("```") % 2 == 0, page


def test_the_example_of_a_file_of_options(folder):
    (page,) = (block for block in blocks_of("docs/data.md") if block.kind == "yaml")
    Path("run.yaml").write_text(page.text)
    found = parse_run_config(["--config", "run.yaml"])
    assert found.recipe == "gpt-moe-demo" and found.config.model.moe.top_k == 1
    assert found.config.data.path == ("books:2", "notes.txt")


def code_of_section(title, kind):
    section = (ROOT / "README.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)
    return code.splitlines()


@pytest.mark.parametrize(
    ("title", "kind", "most"),
    [
        ("Three commands", "sh", 3),
        ("Your own text in three commands", "sh", 3),
        ("The layer in six lines", "python", 6),
        ("An engine in six lines", "python", 6),
        ("A server in six lines", "sh", 6),
    ],
)
def test_sections_of_the_readme_are_as_short_as_they_say(title, kind, most):
    assert 0 < len(code_of_section(title, kind)) <= most


def test_the_readme_has_at_most_100_lines_and_six_numbers():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    table = text.partition("## Six numbers\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| ", table, re.MULTILINE)) == 7  # the head is one of them


def test_every_page_is_found_from_the_readme():
    found, to_read = set(), [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        found.add(page)
        links = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text())
        targets = {(page.parent / link).resolve() for link in links if "://" not in link}
        assert all(target.is_file() for target in targets), page
        to_read += targets - found
    pages = {page for folder in ("", "results", "decisions") for page in (ROOT / "docs" / folder).glob("*.md")}
    assert pages <= found, sorted(p.name for p in pages - found)
