"""How many threads may run at once: quotas, affinity, other ranks, and what the user has set."""

import os
import subprocess
import sys

import pytest

from expertmesh.comm import cores
from expertmesh.comm.cores import Room, cpu_quota, share_of, users_threads

V2, V1 = "0::/a/b\n", "3:cpuset:/\n4:cpu,cpuacct:/a/b\n"

QUOTAS = {
    "no groups": ({}, None),
    "no limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
    "own group": ({"proc/self/cgroup": V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
    "a group above": (
        {
            "proc/self/cgroup": V2,
            "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
        },
        2.0,
    ),
    "a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
    "a container, as it is called outside": (
        {"proc/self/cgroup": "0::/docker/1f\n", "sys/fs/cgroup/cpu.max": "50000 100000"},
        0.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "300000",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
        },
        3.0,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        None,
    ),
    "both": (
        {
            "proc/self/cgroup": V1 + "0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/unified/cpu.max": "700000 100000",
        },
        6.0,
    ),
    "damaged": ({"proc/self/cgroup": "0\nx::y:z\n0::/", "sys/fs/cgroup/cpu.max": "9"}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_quotas(tmp_path, name):
    files, expected = QUOTAS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (Room("a", (0, 1, 2, 3), None), [], 4),
        (Room("a", (0, 1, 2, 3), 2.9), [], 2),
        (Room("a", (0, 1, 2, 3), 0.5), [], 1),
        (Room("a", (0, 1, 2, 3), None), [Room("a", (0, 1, 2, 3), None)], 2),
        (Room("a", (0, 1, 2, 3), None), [Room("b", (0, 1, 2, 3), None)], 4),
        (Room("a", (0, 1), None), [Room("a", (2, 3), None)], 2),
        (Room("a", (0, 1, 2, 3), 6.0), [Room("a", (0, 1, 2, 3), 6.0)] * 2, 1),
        (Room("a", (0,), None), [Room("a", (0,), None)] * 3, 1),
    ],
)
def test_ranks_of_a_host_share_its_cores(own, others, expected):
    assert share_of(own, [*others, own]) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_affinity_counts():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores.own_room().cores == (min(before),)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("launcher", "own", "expected"),
    [
        ({}, {}, None),
        ({}, {"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS=1"),
        ({}, {"OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS=3"),
        ({}, {"MKL_NUM_THREADS": "2"}, "MKL_NUM_THREADS=2"),
    ],
)
@pytest.mark.parametrize("num_ranks", [None, 1, 2])
def test_torchruns_one_thread_is_not_the_users(monkeypatch, launcher, own, expected, num_ranks):
    """It sets OMP_NUM_THREADS=1 for several ranks; one rank alone has what the user has set."""
    parent = subprocess.Popen([sys.executable, "-c", "input()"], env=launcher, stdin=subprocess.PIPE)
    try:
        while not (environment := cores.Path(f"/proc/{parent.pid}/environ")).exists():
            pass
        if launcher:
            while b"OMP" not in environment.read_bytes():  # until the new program is there
                pass
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        if num_ranks is not None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
        while num_ranks == 2 and not launcher and b"OMP" in environment.read_bytes():
            pass
        alone = f"OMP_NUM_THREADS={own['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in own else expected
        assert users_threads(parent.pid) == (expected if num_ranks == 2 else alone)
    finally:
        parent.communicate()
