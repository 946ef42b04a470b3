"""Ctrl-C from the start of the process on: one line and 130, whatever is being imported."""

import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.main import VERBS

# The interrupt comes while a module is imported, by a library that takes it for a failure of its own, as some do.
SCRIPT = """
import os, signal, sys

module = sys.argv.pop(1)

class Interrupted:
    def find_spec(self, name, *more):
        if name != module:
            return None
        try:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))
        except BaseException as error:
            raise ImportError(name) from error

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
from expertmesh.__main__ import program
program()
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("pydantic", ["train"]),
        ("expertmesh.cli.main", ["report", "."]),
        *((f"expertmesh.cli.{verb}", [verb]) for verb in VERBS),
        *((verb.run.partition(":")[0], [name]) for name, verb in FAMILY_VERBS.items()),
        ("torch", ["doctor"]),
        ("torch", ["report", "."]),
        ("torch", ["convert", "--from", ".", "--to", "new"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_interrupt_of_an_import(module, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
