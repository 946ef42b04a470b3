"""Experiments of claims, which nothing else reads daily, still start."""

import runpy
import sys
from pathlib import Path

import pytest

CLAIMS = Path(__file__).parents[2] / "benchmarks" / "claims"
STARTED = sorted(p.stem for p in CLAIMS.glob("*.py") if '__name__ == "__main__"' in p.read_text())


def test_all_are_found():
    assert {"__main__", "lohelp", "upcycling", "vision_claims"} <= set(STARTED)


@pytest.mark.parametrize("name", STARTED)
def test_each_imports_and_shows_its_help(name, capsys):
    words, sys.argv = sys.argv, [name, "--help"]
    try:
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(CLAIMS / f"{name}.py"), run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name != "expertmesh_families":
            raise
        pytest.skip("about a family that is not here")
    finally:
        sys.argv = words
    assert stop.value.code == 0
    assert "--help" in capsys.readouterr().out
