"""Commands that are suggested work where they are read."""

import sys
from pathlib import Path

import pytest

from expertmesh.cli.program import program, spell_program


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
    assert program() == ".venv/bin/expertmesh"
    monkeypatch.setenv("PATH", str(environment))
    assert program() == "expertmesh"
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert program() == str(environment / "expertmesh")


def test_an_interpreter_without_a_program_beside_it(environment):
    Path(environment / "expertmesh").unlink()
    assert program() == "expertmesh"


def test_messages(environment):
    said = spell_program(
        "train it first: expertmesh train; see /x/expertmesh report and expertmesh."
    )
    assert (
        said
        == "train it first: .venv/bin/expertmesh train; see /x/expertmesh report and expertmesh."
    )
