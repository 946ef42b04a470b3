"""Every example of examples/ runs, or parses, and torchrun and our command line take the words in it."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import expertmesh as em
from expertmesh.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
NODES, GPUS = 4, 8

STUBS = {
    "scontrol": 'test "$1 $2" = "show hostnames"; printf "%s\\n" node7 node8',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "torchrun": 'printf "%s\\n" "$@" > "$WORDS"',
}


def words_of_slurm(folder):
    """What torchrun gets, with stand-ins for Slurm's commands."""
    for name, script in STUBS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "WORDS": str(folder / "words"),
        "SLURM_JOB_NODELIST": "node[7-10]",
        "SLURM_JOB_NUM_NODES": str(NODES),
        "SLURM_JOB_ID": "17",
    }
    script = str(EXAMPLES / "slurm.sbatch")
    subprocess.run(["bash", script], env=environment, cwd=folder, check=True)
    return (folder / "words").read_text().splitlines()


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def words_of_kubernetes(_):
    service, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    name = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] is None or service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == name
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == NODES
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    words = container["args"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:29400" in words
    return words


def words_of_kubeflow(_):
    (job,) = documents("kubeflow.yaml")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (NODES, GPUS)
    # what the runtime says by environment variables
    return [f"--nnodes={NODES}", f"--nproc-per-node={GPUS}", *trainer["args"]]


@pytest.mark.parametrize("find", [words_of_slurm, words_of_kubernetes, words_of_kubeflow])
def test_the_words_are_understood(find, tmp_path, monkeypatch, capsys):
    words = find(tmp_path)
    launcher = get_args_parser().parse_args(words)
    assert (launcher.nnodes, launcher.nproc_per_node) == (str(NODES), str(GPUS))
    assert launcher.numa_binding == "node"
    assert launcher.module
    assert launcher.training_script == "expertmesh"
    for name, value in {
        "TORCHELASTIC_RUN_ID": "17",
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": NODES * GPUS,
    }.items():
        monkeypatch.setenv(name, str(value))
    ours = [*launcher.training_script_args, "--train.device", "cpu", "--dry-run"]
    assert main(ours) == 0, capsys.readouterr().err
    assert f"of each of {NODES * GPUS} ranks" in capsys.readouterr().out


def said_by(name, capsys, *words):
    """The lines that an example prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_own_module_needs_few_lines():
    text = (EXAMPLES / "train_your_own.py").read_text()
    assert sum(map(bool, text.splitlines())) <= 25


def test_train_your_own(tmp_path, monkeypatch, capsys):
    """It trains, and started again it goes on; the model that it saved is the one that is loaded."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        right, steps = said_by("train_your_own.py", capsys)[-1].split("% right after ")
        assert float(right) > 75 and steps == "200 steps"
    names = runpy.run_path(str(EXAMPLES / "train_your_own.py"))
    with pytest.raises(em.ConfigError, match=r"load it by expertmesh.load\(run, module="):
        em.load("runs/quadrants")
    model, tokenizer = em.load("runs/quadrants", module=names["Classifier"])
    assert tokenizer is None and not model.training
    x = torch.randn(500, 16)
    y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
    assert names["loss"](model, x, y)[2]["accuracy"] > 0.75


def said_on_a_rank(folder):
    """What a copy of the example prints, line by line."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path("own.py", run_name="__main__")
    return said.getvalue().splitlines()


def test_of_several_ranks_one_prints(tmp_path, two_ranks):
    text = (EXAMPLES / "train_your_own.py").read_text()
    assert text.count(": 200}") == 1
    (tmp_path / "own.py").write_text(text.replace(": 200}", ": 10}"))
    first, second = two_ranks.run(said_on_a_rank, tmp_path)
    assert first[-1].endswith("% right after 10 steps") and second == []


def test_layer_in_your_model(capsys):
    lines = said_by("layer_in_your_model.py", capsys)
    assert float(lines[-1].removesuffix("% right")) > 75


def test_gpt_from_python(capsys):
    lines = said_by("gpt_from_python.py", capsys)
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in lines[:3:2])
    assert last < first and lines[-1].startswith("To be, or")


def test_own_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "".join(f"line {i} of a text, and {i * i} is its square\n" for i in range(3000))
    (tmp_path / "text.txt").write_text(text)
    lines = said_by("own_text.py", capsys, str(tmp_path / "text.txt"), "gpt-moe-test", "3")
    assert sum(line.startswith("---") for line in lines) == 2
    assert any("bits per byte after 3 steps" in line for line in lines)


def test_training_on_policy_sees_the_logprobs_of_the_rollouts_to_the_bit(capsys):
    lines = said_by("rl_on_policy.py", capsys, "20")
    found = [line.split() for line in lines]
    assert [words[::2] for words in found] == [["update", "reward", "difference"]] * 20
    assert {words[5] for words in found} == {"0"}
    rewards = [float(words[3]) for words in found]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        most = 80 if path.name == "rl_on_policy.py" else 60
        assert len(path.read_text().splitlines()) <= most, path.name


def test_all_examples_are_looked_at():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        "gpt_from_python.py",
        "layer_in_your_model.py",
        "own_text.py",
        "train_your_own.py",
        "rl_on_policy.py",
        "slurm.sbatch",
        "kubernetes.yaml",
        "kubeflow.yaml",
    }
