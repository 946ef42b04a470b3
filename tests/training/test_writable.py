"""All that a run will write is tried before its first step."""

import os
import re

import pytest

from expertmesh.runs.run_dir import RunDir
from expertmesh.training.sweep import sweep


def a_file(path):
    path.write_text("x")


def a_folder(path):
    (path / "inside").mkdir(parents=True)


def a_link_to_a_file(path):
    path.with_name("elsewhere").write_text("x")
    path.symlink_to(path.with_name("elsewhere"))


IN_THE_WAY = [
    ("checkpoints", a_file),
    ("checkpoints", a_link_to_a_file),
    ("tensorboard", a_file),
    ("metrics.jsonl", a_folder),
    ("experts.jsonl", a_folder),
    ("versions.json", a_folder),
    ("arithmetic.json", a_folder),
]


@pytest.mark.parametrize(("name", "put"), IN_THE_WAY)
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_what_is_in_the_way_is_said_before_the_first_step(tiny, run_quietly, before_steps, name, put, resume):
    steps = []
    before_steps(lambda model, step: steps.append(step))
    run = RunDir(tiny().train.run_dir).path
    run.mkdir(parents=True)
    put(run / name)
    with pytest.raises((OSError, ValueError), match=re.escape(str(run))):
        run_quietly(tiny(**{"train.resume": resume}))
    assert steps == []


@pytest.mark.parametrize(
    ("name", "put"),
    [("lr-0.002", a_file), ("sweep.json", a_folder), ("lr-0.002/checkpoints", a_file)],
)
def test_a_sweep_tries_all_of_its_runs_first(tiny, before_steps, name, put):
    steps = []
    before_steps(lambda model, step: steps.append(step))
    config = tiny()
    place = RunDir(config.train.run_dir).path / name
    place.parent.mkdir(parents=True)
    put(place)
    with pytest.raises((OSError, ValueError), match=re.escape(str(place))):
        sweep(config, [1e-3, 2e-3])
    assert steps == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_a_folder_that_cannot_be_written(tiny, run_quietly, before_steps, name):
    steps = []
    before_steps(lambda model, step: steps.append(step))
    folder = RunDir(tiny().train.run_dir).path / name
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    with pytest.raises(OSError, match="ermission"):
        run_quietly(tiny(**{"train.resume": "auto"}))
    assert steps == []
