"""`expertmesh doctor` on the cores of a process, of the ranks of torchrun, and near which GPU they are."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S

from expertmesh.cli import doctor
from expertmesh.cli.binding import (
    Binding,
    Gpu,
    core_ranges,
    own_binding,
    threads_verdict,
)
from expertmesh.comm.bind import numbers_of

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_two_cores = pytest.mark.skipif(
    len(CORES) < 2 or shutil.which("taskset") is None, reason="needs two cores and taskset"
)


@pytest.fixture
def sysfs(tmp_path):
    """A machine with two NUMA nodes of four cores, one without cores, and a GPU on the second."""
    for node, cores in (("node0", "0-3"), ("node1", "4-7"), ("node2", "")):
        folder = tmp_path / "devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    device = tmp_path / "bus/pci/devices/0000:dc:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    return tmp_path


ONE_GPU = [SimpleNamespace(name="X", pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([0, 2, 4], "0,2,4")],
    ids=str,
)
def test_core_ranges(numbers, text):
    assert core_ranges(numbers) == text
    assert numbers_of(text) == tuple(numbers)


@pytest.mark.parametrize(
    ("cores", "mark", "part"),
    [
        ((4, 5, 6, 7), "yes", "cores 4-7 of NUMA node 1, 1 thread, cuda:0 (X) of the same node"),
        ((5,), "yes", "cores 5 of NUMA node 1"),
        ((0, 1, 2, 3), "no", "of node 1: start with torchrun --numa-binding=node"),
        (tuple(range(8)), "no", "NUMA nodes 0-1"),
    ],
    ids=str,
)
def test_a_rank_belongs_on_the_node_of_its_gpu(sysfs, cores, mark, part):
    found = own_binding(sysfs=sysfs, cores=cores, gpus=ONE_GPU)
    assert found.gpu == Gpu(0, "X", 1)
    assert found.verdict()[0] == mark
    assert part in found.verdict()[1]
    without = own_binding(sysfs=sysfs, cores=cores, gpus=ONE_GPU, local_rank=1)
    assert without.gpu is None, "more ranks than GPUs"


def test_without_a_gpu_one_node_is_enough(sysfs):
    assert own_binding(sysfs=sysfs, cores=(0, 1), gpus=()).verdict()[0] == "yes"
    mark, text = own_binding(sysfs=sysfs, cores=(0, 4), gpus=()).verdict()
    assert mark == "no"
    assert "numactl --cpunodebind" in text


@pytest.mark.parametrize(
    ("ranks", "threads", "by", "mark", "says"),
    [
        (
            2,
            1,
            None,
            "yes",
            "measure how many are fastest, up to 4 each",
        ),  # torchrun's one counts for nothing
        (2, 8, None, "yes", "up to 4 each"),
        (16, 1, None, "yes", "one each"),
        (2, 4, "OMP_NUM_THREADS=4", "yes", "8 threads on 8 cores"),
        (2, 1, "OMP_NUM_THREADS=1", "no", "leave OMP_NUM_THREADS unset and runs measure"),
        (2, 8, "MKL_NUM_THREADS=8", "no", "or use MKL_NUM_THREADS=4"),
        (16, 1, "OMP_NUM_THREADS=1", "yes", ""),
    ],
)
def test_threads_fill_the_cores_and_no_more(ranks, threads, by, mark, says):
    binding = Binding("host", tuple(range(8)), (0,), 1, threads, threads_by=by)
    found, text = threads_verdict([binding] * ranks)
    assert found == mark
    assert says in text and "--" not in text, "doctor has no such option"
    if threads == 1:
        with_gpu = Binding("host", tuple(range(8)), (0,), 1, 1, Gpu(0, "X", None))
        assert threads_verdict([with_gpu] * ranks)[0] == "yes", "the GPU computes"


@needs_two_cores
def test_a_bound_process_says_so():
    os.sched_setaffinity(0, CORES[-1:])
    try:
        _, text = own_binding().verdict()
    finally:
        os.sched_setaffinity(0, CORES)
    assert re.match(rf"cores {CORES[-1]}[, ]", text), text


def cores_shown(text):
    """Those of each rank in the doctor's report, of which there is one."""
    assert text.count("Ranks") == 1, text
    found = re.findall(r"rank (\d) +\w* *\S+: cores (\S+?)[, ]", text)
    assert [rank for rank, _ in found] == ["0", "1"], text
    return [set(numbers_of(cores)) for _, cores in found]


def bound_doctor(parts):
    """The doctor, without what it says of one process, on a rank that has some of the cores."""
    os.sched_setaffinity(0, parts[int(os.environ["RANK"])])
    doctor.SECTIONS = {}
    return doctor.run([])


@needs_two_cores
def test_the_first_rank_shows_the_cores_of_each(tmp_path):
    parts, agent = [set(CORES[:1]), set(CORES[1:])], Agent(2, tmp_path)
    codes = agent.run(bound_doctor, parts, restarts=0, timeout_s=PATIENCE_S)
    assert codes == [0, 0], [agent.printed(rank) for rank in range(2)]
    assert cores_shown(agent.printed(0)) == parts and agent.printed(1) == ""
