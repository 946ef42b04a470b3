"""How many threads compute: by the sizes of products, kept with the run, said; what the user has set wins."""

import io
import itertools
import json
import re
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from expertmesh.cli.main import main
from expertmesh.cli.waiting import wait_passively
from expertmesh.comm.cores import Room
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.loop import train
from expertmesh.training.pace import Pace, SystemCounts
from expertmesh.training.threads import (
    Threads,
    check_threads,
    computing_with,
    forward_products,
    settle_threads,
)

FOUR_CORES = Room("here", (0, 1, 2, 3), None)
LARGE, SMALL = [Product(1024, 1024, 1024)], [Product(16, 16, 16)]
TWO = [Product(256, 256, 256)]


@pytest.fixture
def four_threads(monkeypatch):
    """A process whose torch has four threads, and nobody has said so."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def settled(products=LARGE, room=FOUR_CORES, **options):
    found = settle_threads(Ranks(), products, room=room, **options)
    return found.count, found.why


ALL = "all that it may use"


def test_what_decides(four_threads, monkeypatch):
    assert settled() == (4, ALL)
    assert settled(SMALL) == (1, "for products of this size")
    assert settled(TWO) == (2, "for products of this size")
    assert settled(given=3) == (3, "parallel.num_threads")
    assert settled(began_with=2) == (2, "as the run began")
    assert settled(began_with=64)[0] == 4, "no more than there are"
    with computing_with(Threads(2, "")):
        assert settled() == (2, ALL), "a caller of Python has set two"
    limited = Room("here", (0, 1, 2, 3), 2.0)
    assert settled(room=limited)[0] == 2, "the container has two cores' worth of time"
    alone = Room("here", (2,), None)
    assert settled(room=alone) == (1, ALL)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert settled() == (4, "OMP_NUM_THREADS=4")
    assert settled(began_with=2) == (4, "OMP_NUM_THREADS=4")
    assert settled(given=2) == (2, "parallel.num_threads")


def test_far_too_many_are_refused():
    check_threads(1)
    with pytest.raises(ConfigError, match=r"parallel.num_threads=1000000: .* cores?; use at most"):
        check_threads(1_000_000)


def test_the_products_of_a_models_forward_pass(tiny):
    model = GPT(tiny().model, dtype=torch.float32, seed=0)
    found = forward_products(model.parameters(), num_rows=2)
    matrices = [p if p.ndim == 2 else p[0] for p in model.parameters() if p.ndim >= 2]
    assert [p.in_features * p.out_features for p in found] == [w.numel() for w in matrices]
    assert all(p.num_rows == 16 for p in found), "fewer rows take no less"
    assert forward_products(torch.nn.ReLU().parameters(), num_rows=1) == []


def first_line(config):
    said = io.StringIO()
    train(config, console=Console(file=said, width=400))
    return said.getvalue().splitlines()[0]


def test_a_run_says_how_many_and_goes_on_with_them(four_threads, tiny, before_steps):
    used = []
    before_steps(lambda model, step: used.append(torch.get_num_threads()))
    schedule = {"optim.schedule_steps": 8, "train.resume": "auto"}
    line = first_line(tiny(**{"train.steps": 4}, **schedule))
    record = RunDir(tiny().train.run_dir).arithmetic
    values = json.loads(record.read_text())
    count = values["threads"]
    assert re.search(rf", {count} threads? \((for products of this size|all that it may use)\)", line)
    assert used == [count] * 4
    record.write_text(json.dumps(values | {"threads": 1}))
    line = first_line(tiny(**{"train.steps": 6}, **schedule))
    assert ", 1 thread (as the run began)" in line and used[4:] == [1, 1]
    del values["threads"]  # a run of before that was kept had torch's number
    record.write_text(json.dumps(values))
    with computing_with(Threads(1, "")):
        assert ", 1 thread (as the run began)" in first_line(tiny(**schedule))
    assert json.loads(record.read_text())["threads"] == 1
    assert torch.get_num_threads() == 4


QUIET = SystemCounts(0.0, 0, 0)
CAUSES = [
    (SystemCounts(0.1, 5000, 0), 0.0, {}, "5,000 pages were read back from the disk"),
    (SystemCounts(0.1, 0, 0), 99.0, {}, "other programs use the processor (load 99.0 on"),
    (SystemCounts(2.0, 0, 500), 0.0, {}, "other programs use the processor"),
    (SystemCounts(0.1, 0, 0), 0.0, {}, "this process waited: for a disk, or for a limit"),
    (SystemCounts(0.1, 0, 0), 99.0, {"has_gpu": True}, "this process waited: for the GPU"),
    (SystemCounts(0.1, 0, 0), 0.0, {"num_ranks": 2}, "another rank was late"),
    (SystemCounts(1.9, 0, 0), 0.0, {}, "computed all the while"),
]


@pytest.mark.parametrize(("spent", "load", "place", "cause"), CAUSES, ids=[c[-1] for c in CAUSES])
def test_a_slow_step_is_said_once_with_its_cause(spent, load, place, cause):
    now = [QUIET]
    watch = Pace(counts=lambda: now[0], load=lambda: load, **place)
    for seconds in (9.0, *[0.2] * 20, 0.9):  # the first step prepares much
        watch.begin()
        assert watch.end(seconds) is None
    watch.begin()
    now[0] = spent
    said = watch.end(2.0)
    assert said.startswith("took 2 s, 10 times the median of 0.2 s: ") and cause in said
    watch.begin()
    assert watch.end(50.0) is None, "once"


def test_pauses_that_nobody_notices_are_not_said():
    watch = Pace()
    for seconds in (0.001,) * 20:
        watch.begin()
        watch.end(seconds)
    assert watch.end(0.05) is None


def test_the_run_says_it(tiny, before_steps):
    began, said = [time.perf_counter()], io.StringIO()

    def wait(model, step):
        if step == 15:  # longer than any step before, however long these took here
            longest = max(b - a for a, b in itertools.pairwise(began))
            time.sleep(6 * longest + 0.2)
        began.append(time.perf_counter())

    before_steps(wait)
    train(tiny(**{"train.steps": 17}), console=Console(file=said, width=400))
    (line,) = [line for line in said.getvalue().splitlines() if "times the median" in line]
    assert re.match(r"step \d+ took [\d.]+ s, \d+ times the median of [\d.e-]+ s: .+ \(said once\)", line)


@pytest.mark.parametrize("set_by_user", ["", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
@pytest.mark.parametrize("loaded", [{"sys"}, {"sys", "torch"}], ids=["before torch", "after torch"])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(set_by_user, loaded):
    environment = {set_by_user: "ACTIVE"} if set_by_user else {}
    expected = environment.copy()
    does = not set_by_user and "torch" not in loaded
    assert wait_passively(environment, loaded) == does
    assert environment == (expected | {"OMP_WAIT_POLICY": "PASSIVE"} if does else expected)


def test_the_command_line_sets_it_before_torch_is_loaded():
    """In a process of its own: here torch is loaded."""
    code = (
        "import os, sys; [os.environ.pop(n, None) for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME')]\n"
        "import expertmesh.cli.main as m\n"
        "m.main = lambda: print('torch' in sys.modules, os.environ.get('OMP_WAIT_POLICY')) or 0\n"
        "m.program()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False PASSIVE\n"


def test_verbs_compute_with_the_number_that_is_chosen(four_threads, tiny, run_quietly, capsys):
    config = tiny()
    run_quietly(config)
    used = set()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: used.add(torch.get_num_threads()) if isinstance(module, GPT) else None
    )
    run = config.train.run_dir
    try:
        for words in (
            ["generate", "--run", run, "--max-tokens", "2", "alpha"],
            ["generate", "--run", run, "--max-tokens", "2", "alpha", "beta"],
            ["report", run, "--samples", "1", "--tokens", "2"],
        ):
            used.clear()
            assert main(words) == 0
            assert 1 in used and (words[0] == "report" or used == {1})  # its page looks at one text
    finally:
        hook.remove()
    capsys.readouterr()
    assert torch.get_num_threads() == 4
