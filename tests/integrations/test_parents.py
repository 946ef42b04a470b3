"""Tutel's own examples through the door, with their import lines changed, beside Tutel's own losses.

`EXPERTMESH_PARENTS` names a folder with checkouts: `tutel` of github.com/microsoft/tutel, commit ac0e51b,
`DeepSpeedExamples` and `DeepSpeed` of github.com/deepspeedai, commits 45b4b71 and edaa722. `make test-parents
PARENTS=folder` runs this file.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "support" / "parents"
PARENTS = Path(os.environ.get("EXPERTMESH_PARENTS") or "parents-not-given")
EXAMPLES = "tutel/tutel/examples"

IMPORTS = {r"^from tutel import": "from expertmesh.integrations.tutel import"}
"""What is changed in a script."""

SIZES = {
    r"outer_batch, sequence_length = 16, 1024": "outer_batch, sequence_length = 4, 16",
    r"model_dim, hidden_size = 2048, 2048": "model_dim, hidden_size = 32, 48",
    r"device_ids=\[args.local_rank\]": "device_ids=None",
}
"""Numbers without an option, made to fit CPUs for the parent as well."""

SHORT = ["--num_steps", "10", "--num_tokens", "16", "--model_dim", "32", "--batch_size", "4"]
FFN = [*SHORT, "--device", "cpu", "--hidden_size", "32"]
OWN = [*SHORT, "--device", "cpu"]
IMAGES = ["--epochs", "2", "--batch-size", "16", "--log-interval", "1"]
SHARED = "helloworld --num_local_experts -2"
CASES = {
    "helloworld": [*FFN, "--l_aux_wt", "0.1", "--capacity_factor", "1.25"],
    "helloworld --top 4": [*FFN, "--num_local_experts", "1", "--capacity_factor", "0"],
    "helloworld_ddp": FFN,
    "helloworld_ddp_tutel": FFN,
    "helloworld_amp": [*SHORT, "--hidden_size", "32"],
    SHARED: [*FFN, "--top", "1"],
    "helloworld --expert_type llama_ffn": [*FFN, "--top", "1"],
    "helloworld_switch": FFN,
    "helloworld_custom_gate_expert": OWN,
    "helloworld_custom_expert_sharded": OWN,
    "helloworld_from_scratch": [],
    "moe_mnist": IMAGES,
    "moe_cifar10": IMAGES,
}
FAILS_THERE = {"helloworld_amp": "starts NCCL without a GPU"}
SHA256 = {
    "helloworld": "4fb4d24be3544edc79413bc7ed7e962a6b5b319b933b280966c9292342041b8b",
    "helloworld_amp": "e61f847ff294df240656dfe95aabfce990564b038af1b867abda1407d23a8401",
    "helloworld_custom_expert_sharded": "1728bdb6a533e184434db55d0fae7b9b8ea21091bc3582b2311464fe5e3e3773",
    "helloworld_custom_gate_expert": "d125aec21c3bed889dcd5a69b6432394022b497d7ad1fd0acd28dfc7e8012c6f",
    "helloworld_ddp": "5e1185c87174967db3121b53cb8d0d8f1840c129416382ead6155d56f0f43903",
    "helloworld_ddp_tutel": "d12f845a27a72881316b32202910e3a4581fbea17948f3487afc452c95f69f09",
    "helloworld_from_scratch": "5e80f50afa36bee3f86e4de121166bb5d9e009d54c79f4acf0095549803e2da5",
    "helloworld_switch": "b540da93226f2b2aada0d1f8e4f5fdde021a4325043bfdd0fa688b6d6a9d27cb",
    "cifar10_deepspeed": "4ae71cfb528a3b91b8f95eddeb0787eba98db2b4b5b48631f5248f6765234666",
    "moe_cifar10": "a6807406e2dda9654d65ffd0f40c1605bee2b96a3adcdf70a520ad0f7b3a1a62",
    "moe_mnist": "88c6fc895f9149825e8b9dba20a2f748e6e39b5ade75f0b471e749c6c85db1a4",
}
SIX_DIGITS = 1.01e-5
"""Losses are printed with five decimals, where equal ones may be rounded apart."""


def changed(path, table):
    text = path.read_text()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[path.stem], f"{path}: other version"
    for pattern, line in table.items():
        text = re.sub(pattern, line, text, flags=re.MULTILINE)
    return text


def losses(script, arguments, ranks, *paths):
    """Losses that a script prints."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*start, str(script), *arguments],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, [*paths, STAND_INS])), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(x) for x in re.findall(r"[lL]oss(?: = |: *)([0-9.]+)", done.stdout)]


@pytest.mark.skipif(not (PARENTS / "tutel").is_dir(), reason="EXPERTMESH_PARENTS has no tutel")
@pytest.mark.parametrize(("case", "ranks"), [(c, n) for c in CASES for n in (1, 2) if (c, n) != (SHARED, 1)])
def test_tutels_examples(case, ranks, tmp_path):
    name = case.split()[0]
    arguments = CASES[case] + case.split()[1:]
    path = PARENTS / EXAMPLES / f"{name}.py"
    ours, theirs = tmp_path / "ours.py", tmp_path / "theirs.py"
    ours.write_text(changed(path, IMPORTS | SIZES))
    found = losses(ours, arguments, ranks, ROOT / "src")
    assert len(found) >= 8, found
    if name in FAILS_THERE:
        return
    theirs.write_text(changed(path, SIZES))
    expected = losses(theirs, arguments, ranks, PARENTS / "tutel")
    assert found == pytest.approx(expected, rel=0, abs=SIX_DIGITS)


CIFAR = PARENTS / "DeepSpeedExamples" / "training" / "cifar" / "cifar10_deepspeed.py"
DOOR = {
    r"^from deepspeed.moe.utils import": "from expertmesh.integrations.deepspeed import MoE,",
    r"deepspeed\.moe\.layer\.MoE\(": "MoE(",
}
MOE = ["--deepspeed", "--moe", "--log-interval", "1", "--epochs", "12", "--dtype", "fp32"]
MOE += ["--ep-world-size", "2", "--noisy-gate-policy", "RSample", "--moe-param-group"]


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not CIFAR.is_file(),
    reason="deepspeed not installed, or EXPERTMESH_PARENTS has no DeepSpeedExamples",
)
@pytest.mark.parametrize(
    "more",
    [["--num-experts", "2"], ["--num-experts", "2", "4", "--mlp-type", "residual", "--stage", "2"]],
)
def test_deepspeeds_cifar_example(more, tmp_path, monkeypatch):
    """Under DeepSpeed's engine, as its run_ds_moe.sh and run_ds_prmoe.sh start it, with ZeRO 0 and 2."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    # kernels are compiled into a folder of this test: a lock that a stopped run left in the usual one would hold them
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "kernels"))
    script = tmp_path / "ours.py"
    script.write_text(changed(CIFAR, DOOR))
    found = losses(script, [*MOE, *more], 2, ROOT / "src")
    assert len(found) == 48 and sum(found[-8:]) < sum(found[:8])


PRELOAD = ["deepspeed", "expertmesh.integrations.deepspeed", "transformers"]
IMPORTS_OF_TESTS = {
    r"^from deepspeed\.moe\.layer import": "from expertmesh.integrations.deepspeed import",
    r"^( *)from deepspeed\.moe\.utils import": r"\1from expertmesh.integrations.deepspeed import",
    r"^from deepspeed\.moe\.sharded_moe import \(top1gating, top2gating, topkgating, ([^)]+)\)": r"""
from deepspeed.moe.sharded_moe import (\1)
from expertmesh.integrations.deepspeed import top1gating, top2gating, topkgating""",
    r"^ *assert saved_model\.sparse_tensor_module_names == .*\n": "",  # 0.19.8 has no such attribute
}
TESTS = {
    "`TestSimpleMoE`, `TestPRMoE`, `TestMoE`, `TestExpertWeightGradWithZero`": (
        "v1/moe/test_moe.py",
        "TestSimpleMoE or TestPRMoE or TestMoE and not TestMoESingleton or TestExpertWeightGradWithZero",
        "passed",
    ),
    "`TestMoECheckpoint`": ("checkpoint/test_moe_checkpoint.py", "TestMoECheckpoint", "passed"),
    "`TestTopk`, `TestTopkGate`, the four functions on capacity": (
        "v1/moe/test_moe.py",
        "TestTopk or TestTopkGate or test_top",
        "passed",
    ),
    "`TestMoESingleton`: `single`, `test_no_ep_group`": (
        "v1/moe/test_moe.py",
        "TestMoESingleton and not multi",
        "passed",
    ),
    "`TestMoESingleton`: `multi`": ("v1/moe/test_moe.py", "TestMoESingleton and multi", "failed"),
    "`TestMOETensorParallel`": ("v1/moe/test_moe_tp.py", "TestMOETensorParallel and not Tutel", "failed"),
    "`TestMOETensorParallelTutel`": ("v1/moe/test_moe_tp.py", "TestMOETensorParallelTutel", "skipped"),
}
"""File, expression of `pytest -k` and outcome of DeepSpeed's tests, by their row of docs/migrate.md."""


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not (PARENTS / "DeepSpeed").is_dir(),
    reason="deepspeed not installed, or EXPERTMESH_PARENTS has no DeepSpeed",
)
@pytest.mark.parametrize("row", TESTS)
def test_deepspeeds_tests(row, tmp_path):
    """Under DeepSpeed's engine, with imports changed."""
    file, words, outcome = TESTS[row]
    shutil.copytree(PARENTS / "DeepSpeed" / "tests", tmp_path / "tests")
    for path in (tmp_path / "tests" / "unit").rglob("*.py"):
        text = path.read_text()
        for pattern, line in IMPORTS_OF_TESTS.items():
            text = re.sub(pattern, line, text, flags=re.MULTILINE)
        path.write_text(text)
    # ranks are forks of a process that has imported all
    (tmp_path / "tests" / "preload.py").write_text(
        f"import multiprocessing\nmultiprocessing.set_forkserver_preload({PRELOAD})\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "preload", f"unit/{file}", "-k", words],
        cwd=tmp_path / "tests",
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "TORCH_EXTENSIONS_DIR": str(PARENTS / "kernels")},
    )
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", found.stdout.splitlines()[-1])
    assert [kind for _, kind in counts] == [outcome], found.stdout[-4000:] + found.stderr[-2000:]
