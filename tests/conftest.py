"""Seeds, threads, hypothesis and the skip rule: more skips than tests/allowed_skips.txt lists is a failure."""

import os

# Before torch is loaded, and for all that tests start. One thread per process unless asked for more: repeatable sums,
# and no fight between the workers of xdist. Threads that wait sleep, or the others of a busy machine wait for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import fnmatch
import gc
import io
import random
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.nursery import the_nursery

hypothesis.settings.register_profile(
    "expertmesh",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("expertmesh")

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
SKIPS = pytest.StashKey[set]()


@pytest.fixture(autouse=True)
def _alone():
    """Every test starts from the same random state, and leaves no process group to the next ones."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    groups = dist.is_initialized()
    yield
    if dist.is_initialized() and not groups:
        dist.destroy_process_group()
        pytest.fail("this test left torch's process group open: the next ones would find it")


@pytest.fixture
def typed(monkeypatch):
    """A function that gives a text, or bytes, to the standard input."""

    def type_(text):
        raw = io.BytesIO(text.encode() if isinstance(text, str) else text)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="ascii"))

    return type_


@pytest.fixture
def threshold(monkeypatch):
    """A function that moves a constant of a module at which the code takes another way: small tensors then take
    both."""

    def move(module, name, value):
        assert name.isupper() and isinstance(getattr(module, name), (int, float))
        monkeypatch.setattr(module, name, value)

    return move


def read_allowed_skips(text: str) -> list[tuple[int, str]]:
    """Lines "MOST PATTERN  # why": at most MOST skips may match the file-name pattern; see `_SkipCounter`."""
    rules = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words:
            rules.append((int(words[0]), words[1]))
    return rules


def skips_over_the_list(skipped: set[str], rules: list[tuple[int, str]]) -> list[str]:
    """One line per broken rule; a skip counts for the first pattern that it matches."""
    counts: Counter[str] = Counter()
    problems = []
    for skip in sorted(skipped):
        pattern = next((p for _, p in rules if fnmatch.fnmatch(skip, p)), None)
        if pattern is None:
            problems.append(f"{skip} was skipped and is not listed in {ALLOWED_SKIPS.name}")
        else:
            counts[pattern] += 1
    for most, pattern in rules:
        if counts[pattern] > most:
            problems.append(f"{counts[pattern]} tests matching {pattern} were skipped, {most} allowed")
    return problems


def pytest_configure(config):
    # Until all tests are found: what is imported stays, and looks for garbage in it took half of the time.
    gc.disable()
    config.stash[SKIPS] = set()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items):
    """A machine without a GPU skips the tests marked so (they are in the list)."""
    if torch.cuda.is_available():
        return
    for item in items:
        # not by keywords: those of a checkout in a folder of this name have it, too
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each worker of `-n` begins with one half and takes from the other in the end: fixtures of a module are made
    once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


class _SkipCounter:
    """Skips of a session: the test's id, and its reason in parentheses."""

    def __init__(self, config):
        self.skipped = config.stash[SKIPS]

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report):
        if report.skipped:
            self._add(report)

    def _add(self, report):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        self.skipped.add(f"{report.nodeid} ({reason})")


def pytest_sessionstart(session):
    session.config.pluginmanager.register(_SkipCounter(session.config))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):
        return  # the controller of xdist sees all reports
    rules = read_allowed_skips(ALLOWED_SKIPS.read_text())
    if exitstatus == 0 and skips_over_the_list(session.config.stash[SKIPS], rules):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    rules = read_allowed_skips(ALLOWED_SKIPS.read_text())
    for problem in skips_over_the_list(config.stash[SKIPS], rules):
        terminalreporter.write_line(f"SKIP RULE: {problem}", red=True)


def pytest_collection_finish(session):
    # Garbage need not be looked for in what is imported from here on either, nor in forked ranks.
    gc.collect()
    gc.freeze()
    gc.enable()
    # when all test modules are imported, and before any test has started a thread
    session.config.add_cleanup(the_nursery().close)


def _pool(num_ranks):
    # here, because only tests of several ranks pay for it
    from tests.support.ranks import RankPool

    pool = RankPool(num_ranks)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks():
    """A pool of two ranks, forked once per session."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    """A pool of four ranks, forked once per session."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def eight_ranks():
    """A pool of eight ranks, forked once per session."""
    yield from _pool(8)
