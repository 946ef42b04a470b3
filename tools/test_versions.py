"""Tests of the package beside other versions of what it needs, each in an environment of its own: `make test-versions`.

    python tools/test_versions.py                          # the oldest and the newest of each row, a table at the end
    python tools/test_versions.py transformers==5.20.0 -- tests/integrations/test_hub_parity.py

An environment has the packages of the interpreter that runs this, and the given one in front. Words behind `--` go to
pytest.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "transformers==5.20.0": ["tests/integrations", "tests/checkpoints", "-k", "hub or transformers"],
    "transformers": ["tests/integrations", "tests/checkpoints", "-k", "hub or transformers"],
    "pydantic==2.10.0": [
        "tests/config",
        "tests/cli/test_flags.py",
        "tests/cli/test_wrong_words.py",
    ],
    "pydantic": ["tests/config", "tests/cli/test_flags.py", "tests/cli/test_wrong_words.py"],
    "numpy==1.26.0": ["tests/data", "tests/oracle", "--ignore=tests/data/test_records.py"],  # pyarrow needs NumPy 2
    "tokenizers==0.21.0": ["tests/training/test_tokens.py", "tests/training/test_corpus.py"],
}
"""Requirements and the tests that they concern."""
WITH_NEEDS = ("pydantic", "transformers")
"""What fails beside a pydantic-core or a huggingface_hub of another time."""


def run(requirement: str, words: list[str]) -> str:
    """Last line of pytest beside a requirement, or of pip where it does not install."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        place = sysconfig.get_path("purelib", vars={"base": folder})
        Path(place, "packages.pth").write_text(sysconfig.get_path("purelib"))
        install = [
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--ignore-installed",
        ]
        if not requirement.startswith(WITH_NEEDS):
            install.append("--no-deps")
        env = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run([python, *install, requirement], capture_output=True, text=True)
        if done.returncode == 0:
            command = [python, "-m", "pytest", "-q", "-rN", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return "; ".join([f"exit status {done.returncode}", *failed[:5], *lines[-1:]])


def main(words: list[str]) -> None:
    """Run the rows, or those that are named, and print a line for each."""
    cut = words.index("--") if "--" in words else len(words)
    for requirement in words[:cut] or ROWS:
        tests = words[cut + 1 :] or ROWS.get(requirement, ["tests"])
        print(f"{requirement:24} {run(requirement, tests)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
