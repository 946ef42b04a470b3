"""Commands that are suggested work where they are read."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from expertmesh.cli.prog_name import Flags, prog_name
from expertmesh.cli.train import summary
from expertmesh.errors import ConfigError, command
from expertmesh.models.gpt.family import GPT
from expertmesh.training.loop import TrainResult
from expertmesh.training.metrics import evaluations


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment in the working directory."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "expertmesh"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    return folder


def test_a_path_unless_the_environment_is_activated(environment, monkeypatch, tmp_path):
    assert prog_name() == ".venv/bin/expertmesh"
    monkeypatch.setenv("PATH", str(environment))
    assert prog_name() == "expertmesh"
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert prog_name() == str(environment / "expertmesh")


def test_an_interpreter_without_a_program_beside_it(environment):
    Path(environment / "expertmesh").unlink()
    assert prog_name() == "expertmesh"


def test_commands_in_messages_can_be_copied(environment):
    text = f"it first: {command('train')}; torchrun -m expertmesh train ..."
    said = Flags().spell(ConfigError(text))
    assert said == "it first: .venv/bin/expertmesh train; torchrun -m expertmesh train ..."


def test_what_to_try_next_can_be_copied(environment, tmp_path):
    result = TrainResult(
        run_dir=tmp_path / "my runs" / "one",
        step=1,
        items=1,
        seconds=1.0,
        resumed_from=0,
        initial_evaluation=None,
        evaluation=None,
        skipped_steps=0,
        stopped_by=None,
        checkpoint=tmp_path / "step",
    )
    last = summary(result, GPT).splitlines()[-1].removeprefix("try: ")
    assert shlex.split(last)[1:] == ["report", str(result.run_dir)]
    (diverged,) = evaluations([{"step": 1, "eval_loss": None, "eval_bits_per_byte": None}])
    for at, when in ((None, ""), (1, ""), (0, " after step 0")):
        found = summary(replace(result, evaluation=diverged, evaluated_at=at), GPT)
        assert f"validation{when}: nan bits per byte\n" in found
