"""tools/setup.sh, which `make` runs first: every failure is one line, and nothing half-done counts as installed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]

# Stands for a Python that is new enough: makes a .venv with a stand-in of its own; pip fails or not as PIP_SAYS tells.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) exit 0 ;;
  --version) echo "Python 3.12.0" ;;
  "-m venv"*)
    [ -z "$VENV_SAYS" ] || { echo "$VENV_SAYS"; exit 1; }
    mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-c import pip") exit 0 ;;
  "-m pip install"*)
    echo "pip $*"
    [ -z "$PIP_SAYS" ] || { printf '%b\\n' "$PIP_SAYS" >&2; exit 1; } ;;
esac
"""
OLD_PYTHON = """#!/bin/sh
case "$*" in
  *print*) echo 3.9.2 ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def folder(tmp_path):
    """A checkout with nothing on the PATH but the usual tools."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cp", "mkdir", "grep", "tail", "head", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    return tmp_path


def add_python(folder, text, name="python3"):
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def setup(folder, **environment):
    return subprocess.run(
        ["/bin/sh", "tools/setup.sh"],
        cwd=folder,
        env={"PATH": str(folder / "bin"), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def check_failure(done, folder, *words):
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert not (folder / ".venv" / ".installed").exists()


def test_success_leaves_a_stamp(folder):
    add_python(folder, PYTHON)
    done = setup(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / ".venv" / ".installed").exists()


def test_a_newer_python_beside_an_old_one_is_found(folder):
    add_python(folder, OLD_PYTHON)
    add_python(folder, PYTHON, name="python3.12")
    assert setup(folder).returncode == 0


def test_no_python(folder):
    check_failure(setup(folder), folder, "Python 3.11 or newer is needed", "found none", "PYTHON=")


def test_old_python(folder):
    add_python(folder, OLD_PYTHON)
    check_failure(setup(folder), folder, "Python 3.11 or newer is needed", "python3=3.9.2", "PYTHON=")


def test_named_python_is_missing(folder):
    add_python(folder, PYTHON)
    check_failure(setup(folder, PYTHON="/no/python"), folder, "PYTHON=/no/python", "3.11 or newer")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            ["disk is full", "free some"],
        ),
        (
            "WARNING: Retrying ... NewConnectionError(...)\\nERROR: No matching distribution found for x",
            ["no package index", "network"],
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement x (from versions: none)",
            ["no package index", "network"],
        ),
        (
            "ERROR: Could not install: [Errno 13] Permission denied: 'x'",
            ["cannot be written", "a folder that is yours"],
        ),
        (
            "noise\\nerror: subprocess-exited-with-error\\n  note",
            ["installing packages failed", "subprocess-exited", "run make again"],
        ),
        ("Killed", ["installing packages failed", "Killed", "run make again"]),
    ],
)
def test_pip_fails(folder, says, words):
    add_python(folder, PYTHON)
    check_failure(setup(folder, PIP_SAYS=says), folder, *words)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "The virtual environment was not created because ensurepip is not available.",
            ["no venv module", "python3-venv"],
        ),
        ("Error: [Errno 28] No space left on device", ["disk is full", "free some"]),
        ("Error: [Errno 30] Read-only file system: '.venv'", ["cannot be written"]),
    ],
)
def test_venv_fails(folder, says, words):
    add_python(folder, PYTHON)
    check_failure(setup(folder, VENV_SAYS=says), folder, *words)


def test_a_failed_installation_is_tried_again(folder):
    add_python(folder, PYTHON)
    assert setup(folder, PIP_SAYS="Killed").returncode != 0
    assert setup(folder).returncode == 0
    assert (folder / ".venv" / ".installed").exists()


def test_makefile_installs_before_it_runs():
    make = shutil.which("make")
    assert make is not None
    for target in ("demo", "test", "check", "test-fast", "bench", "format"):
        done = subprocess.run(
            [make, "--dry-run", "--always-make", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert "sh tools/setup.sh" in done.stdout
