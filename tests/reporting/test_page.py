"""The page of a report: what is in it for any kind of run, and what a browser makes of it."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.patience import PATIENCE_S
from torch.nn.modules.module import register_module_forward_hook

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.reporting.read import read_run

WIDTHS = (1280, 390)


def broken_off(run, folder):
    """A run that was killed before its first step."""
    folder.mkdir()
    shutil.copy(run / "config.json", folder)


def diverged(run, folder):
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "*.html"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[-1]) | {"loss": None, "grad_norm": None, "step": 9}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(line)]) + "\n")


def dense(run, folder):
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("experts.jsonl", "checkpoints"))


def unfinished(run, folder):
    shutil.copytree(run, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))


STATES = {
    broken_off: "no step was recorded",
    diverged: "diverged",
    dense: "finished: 8 of 8 steps",
    unfinished: "not finished: 3 of 8 steps",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run."""
    place = tmp_path_factory.mktemp("page")
    text = "".join(f"{i} is a number, and its square is {i * i}\n" for i in range(1500))
    for name in ("text.txt", "more.txt"):
        (place / name).write_text(text + name)
    changes = {
        "model.vocab_size": 300,
        "model.moe.capacity_factor": 1.0,
        "data.path": (str(place / "text.txt"), str(place / "more.txt")),
        "data.cache_dir": str(place / "cache"),
        "train.steps": 8,
        "train.eval_every": 4,
        "train.dtype": "float32",
        "train.run_dir": str(place / "run"),
    }
    em.train(em.recipe("gpt-moe-test", changes), quiet=True)
    return place / "run"


def data_of(page):
    """The runs in a page."""
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def test_a_run_whose_name_is_no_text_has_a_page(run, tmp_path):
    copy = tmp_path / os.fsdecode(b"l\xe4uf")
    shutil.copytree(run, copy)
    (found,) = data_of(em.report(copy))
    assert found["name"] == "l\N{REPLACEMENT CHARACTER}uf"


def test_runs_on_a_page_are_told_apart(run, tmp_path, monkeypatch):
    """Also where they are named from inside their folder, and where several folders have the same name."""
    dense(run, tmp_path / "run")
    dense(run, tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other")
    page = em.report(".", run, "../run", page=tmp_path / "page.html")
    assert [found["name"] for found in data_of(page)] == ["other", str(run), "../run"]


def test_a_page_holds_what_the_run_recorded(run):
    (found,) = data_of(em.report(run))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    uses = [json.loads(line) for line in (run / "experts.jsonl").read_text().splitlines()]
    assert found["curves"]["loss"] == [step["loss"] for step in steps]
    assert found["validation"]["step"] == [0, 4, 8]
    experts = found["experts"]
    assert experts["step"] == [step["step"] for step in steps]
    assert experts["sizes"] == [4, 4]
    first = uses[0]["counts"][1]
    assert [row[0] for row in experts["load"][4:]] == [round(4 * count / sum(first), 3) for count in first]
    assert experts["dropped"][0][0] == round(uses[0]["dropped"][0] / sum(uses[0]["counts"][0]), 4)
    assert max(map(max, experts["dropped"])) > 0, "the case is one in which rows are dropped"
    shares = [use.get("dropped_by_position", [[0.0]])[1][0] for use in uses]
    assert experts["positions"][1][0] == round(sum(shares) / len(uses), 4)
    for label, ratios in experts["labels"].items():
        both = [use["counts_by_label"][label][0] for use in uses[-2:]]
        rows = [a + b for a, b in zip(*both, strict=True)]
        assert ratios[:4] == [round(4 * n / sum(rows), 3) for n in rows], label
    assert len(experts["labels"]) == 2, "two places of the text"
    assert found["config"]["model.moe.num_experts"] == "[4]"
    tokens = found["sample"]
    assert tokens and all(len(token["experts"]) == 2 for token in tokens)
    assert all(len(chosen) == 2 for token in tokens for chosen in token["experts"])


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_every_kind_of_run_has_a_page(make, run, tmp_path):
    make(run, tmp_path / "other")
    found = data_of(em.report(run, tmp_path / "other", page=tmp_path / "both.html"))
    assert found[1]["status"].startswith(STATES[make])
    assert (found[1]["experts"] is None) == (make in (broken_off, dense))
    assert bool(found[1]["no_sample"]) != bool(found[1]["sample"])


def test_text_of_a_run_cannot_leave_its_place(run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    config = json.loads((run / "config.json").read_text()) | {"recipe": "</script><script>"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    page = em.report(tmp_path / "other")
    assert data_of(page)[0]["recipe"] == "</script><script>"
    assert "</script><script>" not in page.read_text()


@pytest.mark.parametrize(
    ("runs", "page", "text"),
    [
        ((), None, "needs a run directory"),
        (("nowhere",), None, "does not exist"),
        (("run",), "/dev/null", "is no regular file"),
        (("run",), ".", "is no regular file"),
    ],
)
def test_mistakes(runs, page, text, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    with pytest.raises(em.ConfigError, match=text):
        em.report(*runs, page=page)


def test_the_command_writes_a_page_of_a_run_that_it_cannot_judge(run, tmp_path, capsys):
    diverged(run, tmp_path / "other")
    assert main(["report", "--run", str(tmp_path / "other")]) == 0
    said = capsys.readouterr()
    assert f"page: {tmp_path / 'other' / 'report.html'}" in said.out
    assert "no checkpoint" in said.out and not said.err


def test_the_summary_says_which_run_it_is_of(run, capsys):
    assert main(["report", str(run), str(run), "--samples", "0"]) == 0
    assert capsys.readouterr().out.count(f"\n=== {run}\n") == 2


def test_all_of_a_report_is_computed_in_the_precision_of_the_run(run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    config = json.loads((run / "config.json").read_text())
    config["train"] |= {"dtype": "bfloat16", "device": "cpu"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    seen = set()
    hook = register_module_forward_hook(lambda *call: seen.add(torch.is_autocast_enabled("cpu")))
    try:
        assert main(["report", str(tmp_path / "other"), "--samples", "1", "--tokens", "3"]) == 0
    finally:
        hook.remove()
    assert seen == {True}


def test_a_read_run_needs_no_plotly(run):
    assert read_run(run)["status"] == "finished: 8 of 8 steps"


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


def test_a_browser_draws_every_plot(browser, run, tmp_path):
    """From disk and offline, beside a run that diverged: nothing on the console, nothing wider than the window."""
    diverged(run, tmp_path / "other")
    path = em.report(run, tmp_path / "other", page=tmp_path / "both.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(Path(path).as_uri())
    backgrounds = set()
    for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        plots = page.locator(".plot")
        assert plots.count() == 6 + 2 * 6
        for i in range(plots.count()):
            drawn = plots.nth(i).locator(".scatterlayer .trace, .heatmaplayer image")
            assert drawn.count() > 0, f"plot {i} is empty"
        # Plots follow the window a moment later.
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")
        page.locator(".token").nth(3).hover()
        assert re.search(r"layer 1: expert \d+ \(\d\.\d\d\)", page.locator("#tip").inner_text())
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        lines = page.locator(".gridlayer path").first
        backgrounds.add(lines.evaluate("line => getComputedStyle(line).stroke"))
    assert len(backgrounds) == 4, "page and plots follow the scheme"
    assert said == []
    context.close()
