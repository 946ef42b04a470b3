"""The kernels in C in processes of every kind: forked while they load or after, with more threads than cores, on
systems that refuse a set."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.kernels.cpu import library
from expertmesh.kernels.cpu.build import BuildError
from expertmesh.kernels.cpu.instructions import TORCH, flags_of_processor, sets_of
from expertmesh.kernels.cpu.library import TilesError

SETS = sets_of(flags_of_processor())
PROCESSES = """
import os, threading, time
import torch
from torch.utils.data import DataLoader
from expertmesh.kernels.cpu import library
from expertmesh.ops import native_linear

def product():
    return native_linear.linear(x, w, None)

def in_child(function):
    if (child := os.fork()) == 0:
        is_right = False
        try:
            is_right = function()
        finally:
            os._exit(not is_right)
    return os.waitpid(child, 0)[1] == 0

class Products:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return product()

def hold():
    with library._lock:
        held.set()
        time.sleep(0.3)

held = threading.Event()
threading.Thread(target=hold).start()
held.wait()
print("forked while it loads:", in_child(lambda: library.loaded().name is not None))
torch.manual_seed(0)
torch.set_num_threads(9)
x, w = torch.randn(40, 96).bfloat16(), torch.randn(640, 96).bfloat16()
print("threads:", torch.get_num_threads())
together = product()
print("forked after use:", in_child(lambda: torch.equal(product(), together)))
print("workers:", all(torch.equal(y, together) for y in DataLoader(Products(), batch_size=None, num_workers=2)))
torch.set_num_threads(1)
print("alone:", torch.equal(product(), together))
"""


@pytest.mark.skipif(library.loaded().kernels is None, reason="no C compiler")
def test_forked_processes_and_more_threads_than_cores_have_the_same_bits():
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    expected = [
        "forked while it loads: True",
        "threads: 9",
        "forked after use: True",
        "workers: True",
        "alone: True",
    ]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TilesError("no tiles"), "no tiles"),
        (BuildError("cc fails: unrecognized option"), "cc fails: unrecognized option"),
        (OSError("no.so: failed to map segment\nmore"), "no.so: failed to map segment"),
        (AttributeError("no.so: undefined symbol: f"), "no.so: undefined symbol: f"),
    ],
)
@pytest.mark.parametrize("num_failing", [0, 1, len(SETS)])
def test_a_set_that_cannot_be_loaded_leaves_the_next_lower_one(caplog, error, said, num_failing):
    failing = SETS[:num_failing]

    def of_set(instructions):
        if instructions in failing:
            raise error
        return SimpleNamespace(instructions=instructions)

    found = library.load(of_set=of_set)
    assert found.name == [*(one.name for one in SETS), TORCH][num_failing]
    assert found.problem == (said if failing else "")
    warnings = [one.getMessage() for one in caplog.records]
    is_last = num_failing == len(SETS)
    said = f"experts on this CPU are computed by PyTorch's own products: {said}"
    assert warnings == [said] * is_last
