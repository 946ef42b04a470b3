"""Two hosts: two network namespaces of this machine, a cable between them, and torchrun on each."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tests.support.patience import PATIENCE_S
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.models.gpt.recipes import RECIPES

STEPS = 4
OPTIONS = {
    "model.moe.router_noise": "gumbel",
    "data.max_bytes": 60_000,
    "train.steps": STEPS,
    "optim.warmup_steps": 1,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_every": STEPS,
    "train.checkpoint_every": STEPS,
    "train.tensorboard": False,
}
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def end_processes(host):
    for pid in ip("netns", "pids", host).split():
        os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts(rate=None):
    """Names of two namespaces, each with an interface `net0`; the rate of the cable in tc's words."""
    hosts = [f"expertmesh-{os.getpid()}-{number}" for number in range(2)]
    made = []
    try:
        for host in hosts:
            ip("netns", "add", host)
            made.append(host)
        peer = ("peer", "name", "net0", "netns", hosts[1])
        ip("link", "add", "net0", "netns", hosts[0], "type", "veth", *peer)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "net0")
            ip("-n", host, "link", "set", "net0", "up")
            ip("-n", host, "link", "set", "lo", "up")
            if rate is not None:
                words = ("qdisc", "add", "dev", "net0", "root", "tbf", "rate", rate)
                words += ("burst", "256kb", "latency", "100ms")
                subprocess.run(["tc", "-n", host, *words], capture_output=True, check=True)
        yield hosts
    finally:
        for host in made:
            end_processes(host)
            ip("netns", "delete", host)


def unavailable(rate=None):
    """Why there can be no two hosts here; None: there can."""
    if shutil.which("ip") is None or (rate is not None and shutil.which("tc") is None):
        return "no iproute2"
    try:
        with two_hosts(rate):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces are not permitted: {error}"


def launch(host, address, words, ranks_per_host):
    """Torchrun on one host, as docs/cluster.md says it."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks_per_host}"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--rdzv-id=1"]
    # the namespaces share this machine's name, so torchrun must be told which one the endpoint is
    is_host = int(address == ADDRESSES[0])
    launcher += [f"--local-addr={address}", f"--rdzv-conf=is_host={is_host}", "-m", "expertmesh"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1"}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # nobody answers questions for names here
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *launcher, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value).lower())]


def received_bytes(host):
    (link,) = json.loads(ip("-n", host, "-s", "-j", "link", "show", "net0"))
    return link["stats64"]["rx"]["bytes"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    here = {"train.run_dir": str(folder / "run"), "data.cache_dir": str(folder / "cache")}
    train_quietly(RECIPES["gpt-moe-test"]().updated(OPTIONS | here))
    return lines_of(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "ranks_per_host"),
    [(None, 1), pytest.param("40mbit", 2, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_two_hosts_train_as_one_process(tmp_path, one_process, rate, ranks_per_host):
    why = unavailable(rate)
    if why is not None:
        pytest.skip(why)
    here = {"train.run_dir": str(tmp_path / "run"), "data.cache_dir": str(tmp_path / "cache")}
    words = ["train", "gpt-moe-test", *flags(OPTIONS | here)]
    with two_hosts(rate) as hosts:
        agents = [launch(host, address, words, ranks_per_host) for host, address in zip(hosts, ADDRESSES, strict=True)]
        try:
            outputs = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
        crossed = [received_bytes(host) for host in hosts]
    assert_same_lines(lines_of(tmp_path / "run"), one_process, "loss", "grad_norm", "eval_loss")
    assert min(crossed) > 1 << 20, f"tokens or gradients crossed the cable: {crossed} bytes"
    assert sum(f"{2 * ranks_per_host} ranks of 1 thread" in output for output in outputs) == 1
    assert sum("bits per byte" in output for output in outputs) == 1, "one rank of all prints"
