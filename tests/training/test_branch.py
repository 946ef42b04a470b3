"""Branches of a trunk: the same run as a straight one of their length; what cannot be a branch is one line."""

import json
import shutil
from pathlib import Path

import pytest
from tests.support.mistakes import reseal

from expertmesh.checkpoints.store import list_checkpoints, step_of
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.gpt.family import GPT
from expertmesh.training.branch import branch_point
from expertmesh.training.metrics import read_metrics

WSD = {"optim.schedule": "wsd", "train.checkpoint_every": 2, "train.keep_last": 1}


@pytest.fixture
def make(tiny, tmp_path):
    """A function that makes the configuration of a run by the name of its folder."""

    def make(name, **changes):
        return tiny(**(WSD | {"train.run_dir": str(tmp_path / name)} | changes))

    return make


@pytest.fixture(scope="module")
def trunk(tiny_in, tmp_path_factory, run_quietly):
    place = tmp_path_factory.mktemp("branches")
    own = {"train.steps": 10, "train.keep_every": 4, "train.run_dir": str(place / "trunk")}
    config = tiny_in(place, **WSD, **own)
    run_quietly(config)
    kept = [step_of(path) for path in list_checkpoints(Path(config.train.run_dir) / "checkpoints")]
    assert {4, 8} <= set(kept) and not {2, 6} & set(kept)
    return config


def losses(config):
    lines = read_metrics(Path(config.train.run_dir) / "metrics.jsonl")
    return {line["step"]: (line["loss"], line["grad_norm"], line["lr"]) for line in lines}


def test_a_branch_ends_as_a_straight_run_does(make, run_quietly, trunk):
    """Of 6 steps, the last two decay; it goes on from its own checkpoints when it is resumed."""
    short = {"train.steps": 6, "optim.decay_fraction": 1 / 3, "optim.min_lr_ratio": 0.0}
    branch = make("branch", **short, **{"train.branch_from": trunk.train.run_dir})
    result = run_quietly(branch)
    straight = make("straight", **short)
    run_quietly(straight)
    decay = {step: losses(straight)[step] for step in (5, 6)}
    assert losses(branch) == decay and losses(trunk)[6] != decay[6]
    assert result.resumed_from == 4
    again = run_quietly(branch.updated({"train.resume": "auto"}))
    assert again.resumed_from == 6 and losses(branch) == decay


WRONG = [
    ({"optim.schedule": "cosine"}, "branch_from=.*: needs a schedule .* optim.schedule is cosine"),
    ({"optim.lr": 0.5}, r"optim.lr=0.5: the trunk .*trunk has 0\.\d+; use that value"),
    ({"train.batch_size": 2}, r"train.batch_size=2: the trunk .*trunk has \d+; use that value"),
    ({"train.freeze": ("router",)}, r"train.freeze=router: the trunk .*trunk has \(\); use that"),
    ({"train.steps": 8}, r"no checkpoint of step 6, where this run's decay begins \(kept: 4, 8\)"),
    ({"train.steps": 8, "data.path": "nowhere"}, "no checkpoint of step 6"),  # before the data are read
    ({"train.steps": 20}, "begins its own decay after step 8, and this run would leave it after step 16"),
    ({"model.dim": 16}, "model.dim=16: the run in .* has 32"),
    ({"train.branch_from": "nowhere"}, "branch_from=nowhere: does not exist"),
    ({"train.init_from": "x"}, "branch_from=.*: conflicts with train.init_from"),
    ({"train.keep_every": 3}, "keep_every=3: must be a multiple of train.checkpoint_every, 2"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", WRONG, ids=lambda value: str(value)[:40])
def test_what_is_no_branch(make, run_quietly, trunk, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        branch = {"train.steps": 5, "train.branch_from": trunk.train.run_dir}
        run_quietly(make("branch", **(branch | changes)))
    assert "\n" not in str(error.value)


def slower_once(folder):
    """Its metrics, as those of a run that had decayed, or had another rate, and went on."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"lr": 1e-5})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def larger_batches_once(folder):
    file = folder / "checkpoints" / "step_00000004" / "state.json"
    values = json.loads(file.read_text())
    values["progress"]["samples"] += 1
    file.write_text(json.dumps(values))
    reseal(file.parent)


def taught(folder):
    values = json.loads((folder / "config.json").read_text())
    values["distill"] |= TAUGHT
    (folder / "config.json").write_text(json.dumps(values))


TAUGHT = {"teacher": "runs/teacher", "until": 0.4}
OTHER_WAYS = [
    (slower_once, {}, "had the rate 1e-05 in step 3, where this run has"),
    (
        larger_batches_once,
        {},
        r"had seen \d+ samples after step 4, not 4 x \d+ of train.batch_size",
    ),
    (taught, {"distill": TAUGHT}, "distill.until=0.4: is a share of 5 steps here and of 10 in"),
]


@pytest.mark.parametrize("spoil, changes, words", OTHER_WAYS)
def test_a_trunk_that_went_another_way(make, trunk, tmp_path, spoil, changes, words):
    """A trunk may go on with other options; its branches would not end as straight runs do."""
    other = shutil.copytree(trunk.train.run_dir, tmp_path / "other")
    options = {"train.steps": 5, "train.branch_from": str(other)} | changes
    assert branch_point(make("branch", **options), family=GPT).parent == other / "checkpoints"
    spoil(other)
    with pytest.raises(ConfigError, match=words):
        branch_point(make("branch", **options), family=GPT)


def test_a_damaged_trunk(make, run_quietly, trunk, tmp_path):
    damaged = shutil.copytree(trunk.train.run_dir, tmp_path / "damaged")
    (damaged / "checkpoints" / "step_00000004" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step_00000004 is damaged"):
        run_quietly(make("branch", **{"train.steps": 5, "train.branch_from": str(damaged)}))
