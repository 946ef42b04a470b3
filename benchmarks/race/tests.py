"""Runs tests as a part: each result is kept as it comes, so that one that hangs hides none of the others."""

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.race.parts import Keep
from benchmarks.race.warm import jobs


class _Results:
    """A pytest plugin: outcomes by test."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that ended."""
        if report.failed:
            lines = str(report.longreprtext).strip().splitlines()[-3:]
            self.found["failed"].append({"test": report.nodeid, "when": report.when, "last": lines})
        elif report.when == "call" and report.passed:
            self.found["passed"] += 1
        elif report.skipped:
            self.found["skipped"] += 1
        if report.failed or report.when == "call":
            self.keep(self.found)


def run(
    keep: Keep,
    *,
    paths: Sequence[str],
    marks: str | None,
    device: str,
    tiny: bool = False,
    workers: int | None = None,
) -> dict[str, Any]:
    """A part: run test files in several processes.

    Args:
        keep: of the part.
        paths: files or folders.
        marks: as `-m`.
        device: for the record; tests find theirs themselves.
        tiny: in this process alone.
        workers: processes otherwise; None: as many as there are cores, because most of the time is compiling.

    Returns:
        {"passed", "skipped", "failed": [{"test", "when", "last"}], "device"}.

    Raises:
        AssertionError: a test failed, or none ran.
    """
    results = _Results(keep)
    # PyTorch's CUDA part warns of its own accord (of TF32, of the synchronisation debug mode): no failure
    options = ["-p", "no:cacheprovider", "-W", "default", "-q"]
    options += ["-m", marks] if marks else []
    options += [] if tiny else ["-n", str(workers or jobs())]
    code = pytest.main([*options, *paths], plugins=[results])
    found = results.found | {"device": device}
    keep(found)
    assert code == 0, f"{len(found['failed'])} of the tests failed (pytest: {int(code)})"
    return found
