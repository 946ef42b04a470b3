"""Tests of the package beside other versions of what it needs, each in an environment of its own: `make test-versions`.

    python tools/test_versions.py                                    # every row, oldest and newest, a table at the end
    python tools/test_versions.py transformers "pyarrow zstandard"   # these rows
    python tools/test_versions.py transformers==5.22.0 -- tests/integrations/test_hub_parity.py

An environment has the packages of the interpreter that runs this, and in front the given ones with what they need that
is not there. Words behind `--` go to pytest. The oldest version is the bound in pyproject.toml.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "transformers": ["tests/integrations", "tests/checkpoints", "-k", "hub or transformers"],
    "pydantic": ["tests/config", "tests/cli/test_flags.py", "tests/cli/test_wrong_words.py"],
    "numpy pyarrow zstandard": ["tests/data", "tests/oracle", "tests/training/test_formats.py"],
    "tokenizers": ["tests/training/test_tokens.py", "tests/training/test_corpus.py"],
    "jinja2": ["tests/text", "tests/data/test_template_limits.py"],
    "rich pyyaml": ["tests/cli/test_terminal_progress.py", "tests/cli/test_doctor.py", "tests/cli/test_config_file.py"],
    "fastapi uvicorn prometheus_client": [
        "tests/serve/test_metrics.py",
        "tests/serve/test_bad_input.py",
        "tests/serve/test_http_corners.py",
        "tests/serve/test_openai_client.py",
    ],
    "openai schemathesis": ["tests/serve/test_openai_client.py", "tests/serve/test_schemathesis.py", "tests/text"],
    "llguidance jsonschema": ["tests/engine/test_grammar.py", "tests/engine/test_schemas.py"],
    "accelerate peft safetensors": [
        "tests/integrations/test_transformers_model.py",
        "tests/integrations/test_transformers_lora.py",
        "tests/integrations/test_peft_engine.py",
        "tests/integrations/test_adapter_export.py",
    ],
    "torchao compressed-tensors": ["tests/training/test_torchao_adamw.py", "tests/integrations/test_quantize.py"],
    "tensorboard plotly": ["tests/training/test_run.py", "tests/training/test_named_trackers.py"],
    "sacrebleu pillow": ["tests/families/seq2seq/test_translation_scores.py", "tests/families/swin/test_images.py"],
    "lm_eval datasets": ["tests/integrations/test_evaluation.py", "tests/training/test_formats.py"],
    "torch": ["tests/ops", "tests/moe", "tests/models", "tests/comm", "tests/training/test_step.py"],
}
"""Packages, those of a row together, and the tests that concern them."""


def oldest_versions() -> dict[str, str]:
    """Lower bounds in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line) for part in needs for line in part]
    return {match[1]: match[2] for match in found if match}


def installed(folder: str, requirements: list[str]) -> str:
    """Versions that an environment has of what was required."""
    names = [re.split("[=<>]", requirement)[0] for requirement in requirements]
    places = [sysconfig.get_path("purelib", vars={"base": folder}), sysconfig.get_path("purelib")]
    versions = {}
    for place in reversed(places):
        versions |= {re.sub("[-_.]", "-", d.name).lower(): d.version for d in distributions(path=[place])}
    return " ".join(f"{name} {versions.get(name.replace('_', '-'), 'none')}" for name in names)


def run(requirements: list[str], words: list[str]) -> tuple[str, str]:
    """Versions, and the last line of pytest beside them, or of pip where they do not install."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        place = sysconfig.get_path("purelib", vars={"base": folder})
        Path(place, "packages.pth").write_text(sysconfig.get_path("purelib"))
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade", *requirements]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode == 0:
            command = [python, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        status = [f"exit status {done.returncode}"] if done.returncode else []
        return installed(folder, requirements), "; ".join([*status, *failed[:5], *lines[-1:]])


def main(words: list[str]) -> int:
    """Run the rows, or those that are named, and print a table."""
    cut = words.index("--") if "--" in words else len(words)
    oldest = oldest_versions()
    table = []
    for row in words[:cut] or ROWS:
        tests = words[cut + 1 :] or ROWS.get(row, ["tests"])
        names = row.split()
        of_row = [[f"{name}=={oldest[name]}" for name in names], names] if row in ROWS else [names]
        for requirements in of_row:
            table.append(run(requirements, tests))
            print(": ".join(table[-1]), flush=True)
    print("\n| versions | tests |\n|---|---|")
    for versions, result in table:
        print(f"| {versions} | {result} |")
    return int(any("exit status" in result for _, result in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
