"""Claims on twelve languages: a miniature from files to page, and the interval of a gain that is known."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.claims import languages
from benchmarks.claims.languages import FOLDERS, LANGUAGES, TESTS, TWINS, gain
from benchmarks.claims.runs import Ledger, Runs

from expertmesh_families.seq2seq.costs import forward_flops

CODES = ("cs", "de", "en", "fr")
TINY = {
    "model.vocab_size": 300,
    "model.dim": 16,
    "model.num_heads": 2,
    "model.num_encoder_layers": 2,
    "model.num_decoder_layers": 2,
    "model.ffn_hidden_dim": 16,
    "model.max_source_len": 48,
    "model.max_seq_len": 48,
    "data.languages": CODES,
    "data.neighbours": 4,
    "optim.warmup_steps": 5,
    "train.batch_size": 4,
    "train.dtype": "float32",
}


def said(numbers, code):
    """A sentence of a language: its words for digits are the digit after the code."""
    return " ".join(f"{code}{digit}" for digit in numbers)


@pytest.fixture
def data(tmp_path):
    draws = np.random.default_rng(0)
    for name, test in zip(FOLDERS.values(), TESTS.values(), strict=True):
        (tmp_path / name).mkdir()
        for split, count in (("train", 80), ("val", 8), (test, 6)):
            lines = draws.integers(10, size=(count, 4))
            for code in CODES:
                with gzip.open(tmp_path / name / f"{split}.{code}.gz", "wt") as file:
                    file.write("".join(f"{said(line, code)}\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("claim", languages.CLAIMS.values(), ids=languages.CLAIMS)
def test_mixtures_and_their_twins_learn_the_same_at_equal_operations(claim):
    flops = {}
    for arm in claim.arms:
        model = arm.configuration().model
        found = forward_flops(model, source_len=32, target_len=32)
        flops[arm.name] = found.source_flops + found.target_flops
    for ours in claim.ladder:
        twin = TWINS[ours]
        assert 1 <= flops[twin] / flops[ours] <= 1.03
        first, second = (claim.arm(name).configuration().data for name in (ours, twin))
        assert first == second


def test_a_miniature_from_files_to_page(data, tmp_path):
    pairs = {"data.pairs": ("en-de", "de-en", "en-fr"), "data.without_pairs": ("cs-fr",)}
    few = pairs | {"model.moe.num_experts": (2,), "model.moe.hidden_dim": 16}
    names = ("MoE-8", "dense", "dense, en-de alone")
    changes = dict(zip(names, (few, pairs, {}), strict=True))
    arms = tuple(
        replace(arm, changes={**arm.changes, **changes[name]}, rate_of=None)
        for arm, name in ((LANGUAGES.arm(name), name) for name in names)
    )
    claim = replace(
        LANGUAGES, arms=arms, ladder=("MoE-8",), parts=(20, 10), sweeps=False, single=()
    )
    ledger = Ledger(
        tmp_path / "out" / "languages.json",
        {"dtype": "float32", "threads": 1, "torch": "2", "text": "digits"},
    )
    common = TINY | languages.folders(str(data)) | {"data.cache_dir": str(tmp_path / "cache")}
    runs = Runs(claim, tmp_path / "runs", ledger, languages.measure, changes=common, steps=40)
    for arm in claim.arms:
        for job in runs.jobs(arm, 0, arm.lr):
            runs.finish(job)
    languages.write_page(claim, ledger, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "languages.json").read_text())["runs"]
    assert [(r["arm"], r["part"]) for r in found.values()] == [
        ("MoE-8", 20),
        ("MoE-8", 10),
        ("dense", 20),
        ("dense, en-de alone", 20),
    ]
    mixture, branch, _, alone = found.values()
    assert "scores" not in branch
    assert set(mixture["scores"]["help"]) == {"en-de", "de-en", "en-fr", "cs-fr"}
    assert set(alone["scores"]["pictures"]) == {"en-de"}
    assert len(mixture["scores"]["help"]["en-de"]["lines"].split()) == 6
    taught = [mixture["losses"][pair] for pair in pairs["data.pairs"]]
    assert mixture["loss"] == pytest.approx(np.mean(taught), abs=1e-3)
    page = (tmp_path / "out" / "languages.md").read_text()
    for words in ("| MoE-8 | 1 |", "cs-fr (never taught)", "| dense, en-de alone | dense | 1 |"):
        assert words in page


def test_a_gain_of_two_has_an_interval_around_two():
    draws = np.random.default_rng(0)

    def scores(more):
        of = {
            pair: {"lines": " ".join(str(300 + 10 * more + n) for n in draws.integers(-20, 20, 50))}
            for pair in ("en-de", "de-en", "cs-fr")
        }
        return {"help": of, "pictures": {}}

    sides = [(scores(2), scores(0)) for _ in range(3)]
    mean, low, high = gain(sides, "help")
    assert low < 2 < high and low < mean < high and high - low < 1
    assert gain(sides, "pictures") is None
