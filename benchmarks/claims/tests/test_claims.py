"""Claims on small models: ratios of known curves, and runs that end, branch, are kept, and are not run twice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.claims.arms import CLAIMS
from benchmarks.claims.pages import compared, write_page
from benchmarks.claims.runs import Ledger, Runs
from benchmarks.claims.statistics import bootstrap, geometric_mean, mean, token_ratio, tokens_at
from benchmarks.claims.text import measure

from expertmesh.models.gpt.flops import forward_flops

LINE = {100: 4.0, 200: 3.0, 400: 2.0}
SHAPE = {
    "model.vocab_size": 300,
    "model.max_seq_len": 16,
    "model.dim": 16,
    "model.num_layers": 2,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "data.seq_len": 16,
    "train.batch_size": 4,
    "train.dtype": "float32",
    "optim.warmup_steps": 5,
}
TINY = SHAPE | {"model.ffn_hidden_dim": 16, "model.moe.hidden_dim": 8}


def test_tokens_are_interpolated_and_never_extrapolated():
    assert tokens_at(LINE, 3.0) == pytest.approx(200)
    assert tokens_at(LINE, 2.5) == pytest.approx(200 * 2**0.5)
    assert tokens_at(LINE, 4.5) is None
    assert tokens_at(LINE, 1.9) is None


def test_a_model_that_learns_from_a_quarter_of_the_tokens():
    slow = {4 * tokens: loss for tokens, loss in LINE.items()}
    assert token_ratio(LINE, slow, 800) == (pytest.approx(4), False)
    assert token_ratio(LINE, slow, 800, flops=2.0) == (pytest.approx(2), False)
    # its shortest run is better than that already
    assert token_ratio(LINE, {800: 5.0}, 800) == (8.0, True)
    assert token_ratio(slow, LINE, 400) == (pytest.approx(0.25), False)
    assert token_ratio(LINE, {800: 1.0}, 800) is None


def test_one_budget_alone_tells_no_ratio():
    ladder = {0: LINE, 1: {800: 5.0}, 2: LINE}
    assert compared(ladder, {0: LINE, 1: LINE}) == [0]
    assert compared(ladder, {2: LINE, 0: {800: 5.0}}) == [0, 2]


def test_intervals_hold_the_mean_and_shrink_with_agreement():
    low, high = bootstrap([0.9, 1.0, 1.1], mean)
    assert 0.9 <= low < 1.0 < high <= 1.1
    assert bootstrap([2.0, 2.0, 2.0], geometric_mean) == (pytest.approx(2), pytest.approx(2))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_arms_are_models(claim):
    flops = {
        arm.name: forward_flops(arm.configuration().model, seq_len=256).total_flops
        for arm in claim.arms
    }
    assert claim.arm(claim.base)
    if claim.ladder:
        ours, dense = (flops[name] for name in claim.ladder)
        assert 1 <= dense / ours <= 1.03


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} is {n % 7} and {n % 11}\n" for n in range(4000)))
    return path


def finish(claim, text, tmp_path):
    ledger = Ledger(
        tmp_path / "out" / f"{claim.name}.json",
        {"dtype": "float32", "threads": 1, "torch": "2", "text": "numbers"},
    )
    changes = TINY | {"data.path": str(text), "data.cache_dir": str(tmp_path / "cache")}
    runs = Runs(claim, tmp_path / "runs", ledger, measure, changes=changes, steps=40)
    for arm in sorted(claim.arms, key=lambda arm: arm.teacher is not None):
        for job in runs.jobs(arm, 0, runs.sweep(arm)):
            runs.finish(job)
    write_page(claim, ledger, tmp_path / "out")
    return ledger


def test_a_ladder_of_budgets_is_finished_and_kept(text, tmp_path, monkeypatch):
    few = {"model.moe.num_experts": (4,)}
    claim = CLAIMS["moe"]
    arms = tuple(replace(arm, changes={**arm.changes, **few}) for arm in claim.arms[:2])
    claim = replace(claim, arms=arms, single=(), parts=(20, 10), sweeps=False)
    ledger = finish(claim, text, tmp_path)
    found = [(r["arm"], r["part"], r["tokens"]) for r in ledger.runs.values()]
    assert found == [
        ("MoE", 20, 2560),
        ("MoE", 10, 1280),
        ("dense", 20, 2560),
        ("dense", 10, 1280),
    ]
    assert all(0 < r["loss"] < 6 for r in ledger.runs.values())
    page = (tmp_path / "out" / "moe.md").read_text()
    assert "Token-equivalent" in page and (tmp_path / "out" / "moe.svg").exists()
    kept = json.loads((tmp_path / "out" / "moe.json").read_text())["runs"]
    assert kept == ledger.runs
    # all is known: nothing is trained again, though the runs' folders are gone
    (tmp_path / "runs").rename(tmp_path / "gone")
    assert finish(claim, text, tmp_path).runs == kept
    assert not (tmp_path / "runs").exists()


def test_students_have_the_teacher_of_their_seed(text, tmp_path):
    claim = CLAIMS["mos"]
    few = {"model.num_layers": 2, "model.moe.num_experts": (2,)}
    arms = tuple(replace(a, changes={**a.changes, **few}) for a in claim.arms if a.longer == 1)
    ledger = finish(replace(claim, arms=arms, sweeps=False), text, tmp_path)
    losses = {r["arm"]: r["loss"] for r in ledger.runs.values()}
    assert set(losses) == {arm.name for arm in arms}
    assert losses["student, taught to the end"] != losses["student alone"]
    assert (
        "Nats by which student, taught until 0.7 is better"
        in (tmp_path / "out" / "mos.md").read_text()
    )


def test_a_record_says_of_what_its_runs_are(tmp_path):
    kept = {"text": "numbers", "dtype": "float32"}
    Ledger(tmp_path / "moe.json", kept).add("a run", {"loss": 1.0})
    assert Ledger(tmp_path / "moe.json", None).about == kept
    with pytest.raises(SystemExit, match=r"holds runs of .*; give another --out"):
        Ledger(tmp_path / "moe.json", {**kept, "text": "letters"})


@pytest.mark.parametrize("name", CLAIMS)
def test_pages_are_those_of_the_results_that_are_kept(tmp_path, name):
    kept = Path(__file__).parents[3] / "docs" / "results"
    write_page(CLAIMS[name], Ledger(kept / f"{name}.json", None), tmp_path)
    assert (tmp_path / f"{name}.md").read_text() == (kept / f"{name}.md").read_text()
