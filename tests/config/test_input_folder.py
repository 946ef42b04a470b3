"""Pipes, sockets and devices in the place of files are refused at once, by every verb that reads a folder."""

import os
import socket

import pytest

from expertmesh.cli.main import main

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
    "translate RUN --to de a",
    "classify RUN a.png",
    "report RUN",
    "export RUN --output out.safetensors",
    "convert --from RUN --to new",
    "experts prune RUN --keep 1 --to new",
    "train gpt-moe-test --train.init-from RUN",
]


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


def test_a_link_to_nothing_and_other_folders_are_let_through(folder, capsys):
    (folder / "gone").symlink_to("nowhere")
    (folder / "more").symlink_to(folder)
    assert main(["report", "RUN"]) != 0
    assert "not a file" not in capsys.readouterr().err
