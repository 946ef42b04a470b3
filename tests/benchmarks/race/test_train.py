"""The end-to-end runs of the race without a GPU: text, twin, verdicts, and a dry run that writes its files."""

import json

import pytest

from benchmarks.race import corpus, train
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.recipes import RECIPES, dense_twin


def test_runs_of_model_and_twin_are_recorded(tmp_path):
    def run(*parts, **options):
        train.main(
            device="cpu", tiny=True, parts=parts, runs=tmp_path / "runs", name="dry", out=tmp_path, **options
        )  # fmt: skip
        return json.loads((tmp_path / "dry.json").read_text())

    with pytest.raises(SystemExit, match="how many steps"):
        run("moe")
    assert len(run("moe", run_steps=2)["runs"]) == 1
    moe, dense = run("dense")["runs"]  # as many steps as the record has
    assert (moe["kind"], dense["kind"]) == ("moe", "dense")
    assert moe["tokens"] == dense["tokens"] > 0
    text = (tmp_path / "dry.md").read_text()
    assert "nats per token better" in text
    assert (tmp_path / "dry.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("recipe", ["gpt-moe-1b", "gpt-moe-demo"])
def test_the_dense_twin_costs_the_same(recipe):
    config = RECIPES[recipe]()
    flops = [forward_flops(c.model, seq_len=config.data.seq_len).total_flops for c in (config, dense_twin(config))]
    assert flops[0] <= flops[1] <= 1.02 * flops[0]


def test_text_is_gathered_up_to_a_size(tmp_path):
    folder = corpus.gather(tmp_path / "corpus", max_bytes=300_000)
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert 50_000 < sum(p.stat().st_size for p in files) <= 300_000
    assert all(p.suffix == ".py" for p in files)
    files[0].unlink()
    assert corpus.gather(folder, max_bytes=1) == folder
    assert not files[0].exists(), "an existing folder is taken as it is"


def test_verdicts():
    def row(name, tokens_per_s, utilisation):
        return {"trainee": name, "tokens/s": tokens_per_s, "utilisation": utilisation}

    rows = [row("expertmesh", 200_000, 0.28), row("transformers eager", 70_000, 0.1)]
    lines = train.verdicts({"speed": rows})
    assert "MISSED" in lines[0]
    assert "2.86 x" in lines[1]
    assert "MISSED" in lines[1]
    rows.append(row("expertmesh, torch.compile", 220_000, 0.31))
    lines = train.verdicts({"speed": rows})
    assert all("holds" in line for line in lines)


def test_a_model_that_does_not_learn_is_not_reported():
    train.check("ours", [6.0, 5.9], 6.0)
    for losses, word in (
        ([5.0, 4.9], "starts at"),
        ([6.0, 6.0], "learn"),
        ([6.0, float("nan")], "finite"),
    ):
        with pytest.raises(AssertionError, match=word):
            train.check("ours", losses, 6.0)
