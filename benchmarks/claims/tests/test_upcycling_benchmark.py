"""The benchmark of upcycling in miniature: every arm, equal beginnings, never more operations, and what is done is not done again."""

import json

import pytest

from benchmarks.claims import upcycling


@pytest.fixture
def plan(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        lines = (f"{number} times {other} is {number * other}.\n" for other in range(60))
        (text / f"{number}.txt").write_text("".join(lines))
    sizes = {"vocab_size": 300, "dim": 32, "num_layers": 1, "ffn_hidden_dim": 16, "seq_len": 16}
    return upcycling.Plan(
        trunk_steps=4,
        seeds=(0,),
        sweep_seed=1,
        rates=(1.0,),
        batch_size=2,
        path=str(text),
        cache_dir=str(tmp_path / "cache"),
        runs=tmp_path / "runs",
        out=tmp_path / "out",
        resamples=20,
        **sizes,
    )


def test_the_comparison_in_miniature(plan, monkeypatch, capsys):
    upcycling.main(plan)
    record = json.loads((plan.out / "upcycling.json").read_text())
    assert record["problems"] == []
    assert [r["arm"] for r in record["sweep"]] == ["goes_on", "dense", "copy"]
    assert [r["arm"] for r in record["runs"]] == list(record["chosen"])
    assert len(record["chosen"]) == len(upcycling.ARMS) - 1  # one of the two dense ones
    for arm, (mean, low, high) in record["interval"].items():
        assert low <= mean <= high, arm
    by_arm = {r["arm"]: r for r in record["runs"]}
    dense = next(by_arm[arm] for arm in upcycling.DENSE if arm in by_arm)
    assert dense["steps"] == 4 > by_arm["copy"]["steps"]
    assert by_arm["redraw"]["initial_loss"] != dense["initial_loss"]
    assert by_arm["copy"]["parameters"] == by_arm["scratch"]["parameters"]
    page = (plan.out / "upcycling.md").read_text()
    assert "8 copies, top 2" in page and "NaN" not in page
    assert "polyline" in (plan.out / "upcycling.svg").read_text()

    monkeypatch.setattr(upcycling, "train", None)  # all is done
    before = (plan.out / "upcycling.json").read_text()
    upcycling.main(plan)
    assert (plan.out / "upcycling.json").read_text() == before

    record["sweep"][2]["initial_loss"] += 2 * upcycling.NEAR_NATS
    record["runs"][-1]["training_flops"] *= 2
    problems = upcycling.check(record)
    assert len(problems) == 2 and "nats off" in problems[0]
