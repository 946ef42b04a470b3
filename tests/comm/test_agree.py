"""Ranks of one job compute by one set of kernels, whatever each host's processor and compiler are."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from tests.support.patience import PATIENCE_S

from expertmesh.comm.agree import agree_on_kernels
from expertmesh.comm.world import World
from expertmesh.kernels.cpu import library
from expertmesh.kernels.cpu.instructions import TORCH, VARIABLE, flags_of_processor, sets_of
from expertmesh.ops.backend import cpu_kernels
from expertmesh.ops.experts.native import is_loaded
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS

OWN = [one.name for one in sets_of(flags_of_processor())]
BEST, LOWEST = OWN[0], OWN[-1]


def agreed(wanted):
    """Of rank i, which begins with wanted[i]: name, later messages, warnings and a product's bits."""
    name, said = wanted[dist.get_rank()], []

    class Heard(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, log = Heard(logging.WARNING), logging.getLogger("expertmesh.comm")
    log.addHandler(handler)
    env = {"CC": "no-such-compiler"} if name == TORCH else {VARIABLE: name}
    before, own = dict(os.environ), library._loaded[:]
    os.environ.update(env)
    library._loaded.clear()
    try:
        world = World(timeout_s=PATIENCE_S)
        with world.traffic.logged() as again:
            agree_on_kernels(world.all_ranks())
        world.close()
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(n, 301, generator=generator).bfloat16() for n in (3, 64))
        with torch.no_grad():
            y = BATCH_INVARIANT_OPS.linear(x, w)
        count = len(again.transfers)
        return cpu_kernels(), is_loaded(), count, said, y.view(torch.int16).tolist()
    finally:
        log.removeHandler(handler)
        library._loaded[:] = own
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.skipif(library.loaded().kernels is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ([BEST] * 4, BEST),
        ([LOWEST] * 4, LOWEST),
        ([BEST, LOWEST, BEST, BEST], LOWEST),
        ([LOWEST, BEST, *OWN[1:2], BEST, BEST][:4], LOWEST),
        ([BEST, BEST, BEST, TORCH], TORCH),
        ([TORCH] * 4, TORCH),
    ],
)
def test_all_ranks_compute_by_the_best_that_all_have(four_ranks, wanted, name):
    found = four_ranks.run(agreed, wanted)
    assert [one[0] for one in found] == [name] * 4
    assert {one[1] for one in found} == {name != TORCH}
    differ = len({*wanted}) > 1
    assert {one[2] for one in found} == {1}
    assert [bool(one[3]) for one in found] == [differ, False, False, False]
    assert all(f"all compute by {name}, so" in line for line in found[0][3][-1:])
    assert all(one[4] == found[0][4] for one in found)
