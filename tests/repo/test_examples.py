"""Every example of examples/ runs, or parses, and torchrun and our command line take the words in it."""

import os
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

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


def test_train_your_own(tmp_path, monkeypatch, capsys):
    """It trains, and started again it goes on; the run is reported by the family's name."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "train_your_own.py"), run_name="__main__")
        said = capsys.readouterr().out.splitlines()[-1]
        right, steps = said.split("% right after ")
        assert float(right) > 75 and steps == "200 steps"
    monkeypatch.syspath_prepend(EXAMPLES)
    words = ["report", "--run", "runs/quadrants", "--family", "train_your_own:QUADRANTS"]
    assert main(words) == 0
    assert "validation accuracy, after step 200" in capsys.readouterr().out


def test_all_examples_are_looked_at():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {
        "train_your_own.py",
        "slurm.sbatch",
        "kubernetes.yaml",
        "kubeflow.yaml",
    }
