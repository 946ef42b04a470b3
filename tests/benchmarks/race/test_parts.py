"""A call goes on past parts that hang, raise or crash, keeps what they kept, and never outlasts its time."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
RUN = """
import json, sys
from pathlib import Path
from benchmarks.race.budget import Budget
from benchmarks.race.parts import Part, run_call
parts = [Part(**p) for p in json.loads(sys.argv[1])]
run_call(parts, name="call", out=Path(sys.argv[2]), budget=Budget(float(sys.argv[3])))
"""


def call(parts, out, budget_s=3000.0):
    """Run a call in a process of its own, as `__main__` does, and give its record's parts."""
    listed = [
        {"name": name, "run": f"tests.benchmarks.race.bad_parts:{function}", "limit_s": limit_s} | more
        for name, function, limit_s, more in parts
    ]
    subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(listed), str(out), str(budget_s)],
        cwd=ROOT, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return json.loads((out / "call.json").read_text())["parts"]


def test_the_call_goes_on(tmp_path):
    parts = call(
        [
            ("hangs", "hangs", 1.0, {}),
            ("raises", "raises", 300.0, {}),
            ("crashes", "crashes", 300.0, {}),
            ("fine", "fine", 300.0, {"arguments": {"value": 7}}),
            ("again", "dies_at_the_second", 300.0, {"attempts": 2}),
            ("fresh", "fine", 300.0, {"arguments": {"value": 8}, "fresh": True}),
            ("once", "dies_at_the_second", 300.0, {}),
            ("twice", "dies_at_once_after_the_first", 300.0, {"attempts": 2}),
        ],
        tmp_path,
    )
    states = {name: outcome["state"] for name, outcome in parts.items()}
    assert states == {
        "hangs": "killed",
        "raises": "failed",
        "crashes": "crashed",
        "fine": "done",
        "again": "done",
        "fresh": "done",
        "once": "crashed",
        "twice": "crashed",
    }
    for name in ("hangs", "raises", "crashes"):
        assert parts[name]["result"] == {"first": 1}
    assert "killed after 1 s" in parts["hangs"]["error"]
    assert "a kernel is wrong" in parts["raises"]["error"]
    assert "exit code -6" in parts["crashes"]["error"]
    assert parts["fine"]["result"] == {"value": 7}
    assert parts["fresh"]["result"] == {"value": 8}
    assert parts["again"]["result"] == {"a": "fine", "b": "skipped", "c": "fine"}
    assert parts["twice"]["result"] == {"first": 1}
    assert parts["once"]["result"] == {"a": "fine", "b": "begun"}
    assert "RuntimeError: a kernel is wrong" in (tmp_path / "call.log").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["call.json", "call.log"]


def test_no_part_outlasts_the_call(tmp_path):
    parts = call([("first", "hangs", 600.0, {}), ("second", "fine", 600.0, {})], tmp_path, budget_s=6.0)
    assert parts["first"]["state"] == "killed"
    assert parts["first"]["seconds"] < 30
    assert parts["second"]["state"] == "left out"


def test_a_call_that_is_ended_ends_its_part(tmp_path):
    part = {"name": "hangs", "run": "tests.benchmarks.race.bad_parts:hangs", "limit_s": 600.0}
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps([part]), str(tmp_path), "600"], cwd=ROOT)
    kept = tmp_path / "call.part.json"
    end = time.monotonic() + PATIENCE_S
    while not kept.exists() and time.monotonic() < end:
        time.sleep(0.1)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    process.wait(PATIENCE_S)
    assert not Path(f"/proc/{child}").exists()
