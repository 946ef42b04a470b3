"""The calls on a CPU, as one would run them: every part runs, and the report is made of what they wrote."""

import json
import os
import stat
import sys
import warnings
from pathlib import Path

import pytest
from benchmarks.race.__main__ import main
from benchmarks.race.calls import CALLS, Setting, plan
from benchmarks.race.report import load, markdown, write
from benchmarks.race.verdicts import CUTE, LIGER, SONIC
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S

from expertmesh.kernels.measured import entries
from expertmesh.ops.cpu.compiled_loops import compiler_problem
from expertmesh.ops.experts.backends import BACKENDS

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def command(words, path):
    """`python -m benchmarks.race`, where all that it imports is there."""
    os.chdir(ROOT)
    warnings.resetwarnings()  # here a warning is no error
    os.environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    sys.argv = ["benchmarks.race", *words]
    return main()


def run(call, out, *options, path=""):
    """Run a call, dry, and give its record's parts."""
    out.mkdir()
    agent, words = Agent(1, out.parent), (call, str(out), "--dry-run", *options)
    codes = agent.run(command, words, path, restarts=0, timeout_s=PATIENCE_S)
    parts = json.loads((out / f"{call}.json").read_text())["parts"]
    assert codes == [0], {n: o for n, o in parts.items() if o["state"] != "done"}
    return parts


def test_engine(tmp_path):
    parts = run("engine", tmp_path / "out", "--only", "engine steps")
    result = parts["engine steps"]["result"]
    assert [check["equal"] for check in result["checks"]] == [True, True]
    (row,) = result["rows"]
    assert {"captured, tokens/s", "launched, exact, tokens/s", "price of deterministic"} <= row.keys()
    assert "Steps of the engine" in markdown(load([tmp_path / "out"]), plot="")


def test_kernels(tmp_path):
    stands_in = tmp_path / "compute-sanitizer"
    stands_in.write_text('#!/bin/sh\n[ "$1 $3" = "--tool --error-exitcode" ] && shift 4 && exec "$@"\n')
    stands_in.chmod(stands_in.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "out"
    # "builds" is test_warm.py's, and "tests of the rest" what those of the experts are; each is a process of its own
    only = ("--only", "tests of the experts", "kernels", "properties", "sanitizer")
    parts = run("kernels", out, "--sanitize", *only, path=tmp_path)
    table = parts["kernels qwen3-8k"]["result"]
    assert table["check"].startswith("right")
    rows = {row["kernel"]: row for row in table["kernels"]}
    for kernel in ("router", "maps", "up", "combine", "w_in_grad", "router_grad"):
        assert rows[kernel]["us"] > 0 < rows[kernel]["predicted us"]
    assert set(table["step"]) == {"forward", "backward", "both"}
    assert table["profile"]
    assert parts["tests of the experts"]["result"]["passed"] > 0
    assert parts["sanitizer racecheck"]["result"]["last"] == ["the step ended"]
    missing = {"torch.compile"} if compiler_problem() else set()
    failed = {row["property"] for row in parts["properties"]["result"] if row["holds"] != "yes"}
    assert failed <= missing
    assert sorted(p.name for p in out.iterdir()) == [
        "kernels.json",
        "kernels.log",
        "predictions.md",
    ]
    filled = (out / "predictions.md").read_text()
    assert f"{rows['up']['us']:.0f}" in filled


def test_sweep(tmp_path):
    out = tmp_path / "out"
    parts = run("sweep", out)
    rows = parts["sweep qwen3-8k up"]["result"]["rows"]
    assert [row["candidate"] for row in rows] == ["today", "low-tails"]
    assert all(row["us"] > 0 for row in rows)
    (entry,) = entries(out / "tiles.json")["interpreter"]
    assert set(entry.tiles) == {name.split()[-1] for name in parts if name.startswith("sweep")}


def test_peers_and_report(tmp_path):
    out = tmp_path / "out"
    parts = run("peers", out)
    raced = {row["contender"] for row in parts["layers qwen3-8k"]["result"]["rows"]}
    assert {LIGER, CUTE, SONIC, "ScatterMoE", "Transformer Engine", "torch grouped_mm"} <= raced
    alone = {row["contender"] for row in parts["layers qwen3-8k"]["result"]["experts"]}
    assert {"expertmesh", LIGER, CUTE, SONIC} <= alone
    blog = {row["contender"] for row in parts["layers blog-e16"]["result"]["rows"]}
    assert {"einsum", "Tutel"} <= blog
    write([out], name="dry")
    text = (out / "dry.md").read_text()
    for words in ("## Hard lines", "## Maps", "## Skewed", "## Decoding", "## Training"):
        assert words in text


def test_workloads(tmp_path):
    """One format for all; a rehearsal of each other part."""
    out = tmp_path / "out"
    only = ("lora step", "exact RL bfloat16", "formats fp8", "deterministic", "paged", "full")
    parts = run("workloads", out, "--only", *only)
    (row, _) = parts["formats fp8"]["result"]
    assert 0 < row["off by"] < 0.02 and row["backend"] in BACKENDS
    assert all(row["price"] > 0 for row in parts["deterministic layer"]["result"])
    arms = parts["exact RL bfloat16"]["result"]
    assert [arm["largest |train - rollout|"] for arm in arms] == [0.0] * 4
    paged = parts["paged experts"]["result"]
    assert [check["equal"] for check in paged["checks"]] == [True]
    assert {row["slots"] for row in paged["rows"]} == {"all", 4, 2}
    assert all(0 < row["hit rate"] < 1 for row in paged["rows"] if row["slots"] != "all")
    adapters = parts["lora step"]["result"]
    losses = [float(row["loss, first to last"].split()[0]) for row in adapters["rows"] if "left out" not in row]
    assert len(losses) >= 3 and max(losses) - min(losses) < 0.02
    text = markdown(load([out]), plot="")
    for words in ("## Narrow", "## The price", "## A step with", "## Exact", "## Paged", "## Memory", "step of all"):
        assert words in text


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fits_a_time_limit_of_ten_minutes(call):
    parts, budget_s = plan(call, Setting())
    assert budget_s < 600
    assert len({part.name for part in parts}) == len(parts)
    assert sum(seconds for _, seconds in CALLS.values()) <= 42 * 60
