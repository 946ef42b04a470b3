"""Pipes, sockets and devices in the place of files are refused at once, by every verb that reads a folder."""

import os
import signal
import socket
from contextlib import contextmanager

import pytest
from tests.support.known_rows import known
from tests.support.patience import PATIENCE_S

from expertmesh.checkpoints.peft_folder import read_adapter_files
from expertmesh.cli.main import main
from expertmesh.errors import ConfigError

FILES = [
    "config.json",
    "tokenizer.json",
    "metrics.jsonl",
    "model.safetensors",
    "generation_config.json",
]
FILES += ["checkpoints/step_00000001/.metadata", "checkpoints/step_00000001/__0_0.distcp"]
VERBS = [
    "generate RUN a",
    *known(["translate RUN --to de a", "classify RUN a.png"]),
    "report RUN",
    "export RUN --output out.safetensors",
    "convert --from RUN --to new",
    "experts prune RUN --keep 1 --to new",
    "train gpt-moe-test --train.init-from RUN",
]


@contextmanager
def in_time():
    """Context that is ended by an error where something waits for a pipe."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(round(PATIENCE_S))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN" / "checkpoints" / "step_00000001").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "RUN" / name).write_text("{}")
    return tmp_path / "RUN"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["config.json", "checkpoints/step_00000001/.metadata"])
def test_every_verb_refuses_a_pipe(verb, name, folder, capsys):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert main(verb.split()) == 2
    said = capsys.readouterr().err
    assert f"RUN/{name} is a named pipe, not a file; " in said and said.count("\n") == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_every_file_of_a_run(kind, name, folder, capsys):
    path = folder / name
    path.unlink()
    if kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # names of sockets are short
            made.bind(path.name)
            os.chdir(folder.parent)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    assert main(["generate", "RUN", "a"]) == 2
    assert f"RUN/{name} is {kind}, not a file; " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "config.json"])
def test_a_list_of_runs_waits_for_no_pipe(name, folder, capsys):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with in_time():
        assert main(["runs", "RUN"]) == 0
    assert "RUN" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_refused_that_is_a_pipe(name, tmp_path):
    for other in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / other).write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with in_time(), pytest.raises(ConfigError, match=f"{name} is a named pipe, not a file; "):
        read_adapter_files(tmp_path)


def test_a_link_to_nothing_and_other_folders_are_let_through(folder, capsys):
    (folder / "gone").symlink_to("nowhere")
    (folder / "more").symlink_to(folder)
    assert main(["report", "RUN"]) != 0
    assert "not a file" not in capsys.readouterr().err
