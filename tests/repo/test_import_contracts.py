"""The import contracts in pyproject.toml hold, and each of them notices a violation, in folders yet to come too."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]

FAMILIES = "expertmesh_families"
HAS_FAMILIES = (ROOT / "src" / FAMILIES).is_dir()

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
    "integrations-independent": {
        "integrations/__init__.py": "",
        "integrations/evaluation.py": "",
        "integrations/fairseq.py": "import expertmesh.integrations.evaluation\n",
    },
    "no-tests-in-runtime": {"training/planted.py": "import tests.oracle\n"},
    "acyclic": {
        "costs/planted_one.py": "import expertmesh.costs.planted_two\n",
        "costs/planted_two.py": "import expertmesh.costs.planted_one\n",
    },
}
"""Files of `expertmesh` by contract, each with a line to add."""
OF_FAMILIES = {
    "pure-models": {"swin/model.py": "import expertmesh.comm.mesh\n"},
    "kernels-only-from-ops": {"swin/planted.py": "import expertmesh.kernels.topk\n"},
    "triton-only-in-kernels": {"swin/planted.py": "import triton\n"},
    "torch-free": {"swin/recipes.py": "import torch\n"},
    "third-party": {"seq2seq/planted.py": "import transformers\n"},
    "siblings": {"swin/model.py": "import expertmesh_families.seq2seq.model\n"},
    "core-without-families": {"../expertmesh/training/planted.py": "import expertmesh_families\n"},
    "families-on-models": {"swin/task.py": "import expertmesh.runs.open\n"},
    "no-tests-in-runtime": {"swin/planted.py": "import benchmarks\n"},
    "acyclic": {
        "swin/planted_one.py": "import expertmesh_families.swin.planted_two\n",
        "swin/planted_two.py": "import expertmesh_families.swin.planted_one\n",
    },
}
"""The same of `expertmesh_families`."""
OF_FAMILIES_ALONE = OF_FAMILIES.keys() - VIOLATIONS.keys()
CASES = [
    (package, contract)
    for package, table in (("expertmesh", VIOLATIONS), (FAMILIES, OF_FAMILIES))
    for contract in table
    if package == "expertmesh" or HAS_FAMILIES
]


def write_contracts(folder):
    """The contracts; of the core alone where the families are not there."""
    text = (ROOT / "pyproject.toml").read_text()
    if not HAS_FAMILIES:
        head, *parts = text.split("[[")
        kept = [p for p in parts if not any(f'id = "{name}"' in p for name in OF_FAMILIES_ALONE)]
        text = re.sub(rf',?\s*"{FAMILIES}[^"\n]*"', "", "[[".join([head, *kept]))
    (folder / "pyproject.toml").write_text(text)
    return folder / "pyproject.toml"


def lint_imports(tree, config, *arguments):
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
        + ["--config", str(config), "--no-cache", "--no-logo", *arguments],
        cwd=tree / "src",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PYTHONPATH": str(tree / "src"), "PATH": ""},
    )


def test_contracts_hold(tmp_path):
    done = lint_imports(ROOT, write_contracts(tmp_path))
    assert done.returncode == 0, done.stdout
    known = VIOLATIONS.keys() | (OF_FAMILIES if HAS_FAMILIES else {}).keys()
    assert f"Contracts: {len(known)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(("package", "contract"), CASES)
def test_contract_notices_a_violation(package, contract, tmp_path):
    config = write_contracts(tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    planted = (VIOLATIONS if package == "expertmesh" else OF_FAMILIES)[contract]
    for name, text in planted.items():
        path = tmp_path / "src" / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)
    done = lint_imports(tmp_path, config, "--contract", contract)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
