"""The import contracts in pyproject.toml hold, and each of them notices a violation, in folders yet to come too."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]

VIOLATIONS = {
    "layers": {"ops/planted.py": "import expertmesh.moe.types\n"},
    "ops": {"ops/topk.py": "import expertmesh.ops.permute\n"},
    "pure-models": {
        "parallel/__init__.py": "",
        "parallel/experts/__init__.py": "",
        "parallel/experts/route_split.py": "",
        "models/gpt/model.py": "import expertmesh.parallel.experts.route_split\n",
    },
    "kernels-only-from-ops": {
        "kernels/__init__.py": "",
        "kernels/gemm.py": "",
        "moe/planted.py": "import expertmesh.kernels.gemm\n",
    },
    "triton-only-in-kernels": {"ops/planted.py": "import triton\n"},
    "torch-free": {"costs/planted.py": "import torch\n"},
    "third-party": {"training/planted.py": "import transformers\n"},
    "siblings": {
        "models/swin/__init__.py": "",
        "models/swin/model.py": "import expertmesh.models.gpt.model\n",
    },
    "integrations-independent": {
        "integrations/__init__.py": "",
        "integrations/tutel.py": "",
        "integrations/fairseq.py": "import expertmesh.integrations.tutel\n",
    },
    "no-tests-in-runtime": {"training/planted.py": "import tests.oracle\n"},
    "acyclic": {
        "costs/planted_one.py": "import expertmesh.costs.planted_two\n",
        "costs/planted_two.py": "import expertmesh.costs.planted_one\n",
    },
}


def lint_imports(tree, *arguments):
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
        + ["--config", str(tree / "pyproject.toml"), "--no-cache", "--no-logo", *arguments],
        cwd=tree / "src",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PYTHONPATH": str(tree / "src"), "PATH": ""},
    )


def test_contracts_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(VIOLATIONS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_contract_notices_a_violation(contract, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name, text in VIOLATIONS[contract].items():
        path = tmp_path / "src" / "expertmesh" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)
    done = lint_imports(tmp_path, "--contract", contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
