"""Clusters: by name, from a file, and every mistake in one line."""

import re

import pytest

from expertmesh.costs.hardware import find_cluster, known_devices, network_of
from expertmesh.errors import ConfigError

WANTED = {"a100-40", "a100-80", "h100", "h800", "h200", "b200", "gb200", "mi300x", "cpu"}


def test_every_device_is_a_cluster_with_sources():
    assert known_devices().keys() >= WANTED
    for name in known_devices():
        cluster = find_cluster(f"{name}x8")
        assert cluster.device.sources
        assert cluster.device.memory_gib > 0


def test_prices_are_ranges():
    for name in known_devices():
        prices = find_cluster(f"{name}x1").device.usd_per_hour
        assert not prices or prices[0] <= prices[1]


def test_a_network_is_a_nodes_share():
    cluster = find_cluster("h100x64")
    assert network_of(cluster).across.bytes_per_s == 8 * cluster.across.bytes_per_s
    assert find_cluster("gb200x256").ranks_per_node == 64
    assert find_cluster("gb200x72").ranks_per_node == 72


def test_a_file_lies_on_top_of_a_known_device(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'device = "h100"\nnum_gpus = 16\nranks_per_node = 4\nacross = { latency_s = 1e-5, gb_per_s = 12.5 }\n'
    )
    cluster = find_cluster(str(path))
    assert (cluster.name, cluster.num_gpus, cluster.ranks_per_node) == ("ours", 16, 4)
    assert cluster.across.gb_per_s == 12.5
    assert cluster.inside == find_cluster("h100x8").inside


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000x8", "did you mean h100?"),
        ("quantum", "unknown device, and no such file"),
        ("h100x0", "num_gpus=0: must be greater than 0"),
        ("h100x12", "multiple"),
    ],
)
def test_a_wrong_name_is_one_line(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        find_cluster(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_gpus = 8\n", "device=None: must be given"),
        ('device = "h100"\n', "num_gpus=None: must be given"),
        ('device = "h10"\nnum_gpus = 8\n', "unknown device"),
        ('device = "h100"\nnum_gpus = -8\n', "num_gpus=-8"),
        (
            'device = "h100"\nnum_gpus = 8\ninside = { latency_s = 1e-6, gb_per_s = -1 }\n',
            "inside.gb_per_s=-1",
        ),
        ('device = "h100"\nnum_gpus = 8\ninside = { latency_s = 1e-6 }\n', "inside.gb_per_s"),
        ('device = "h100"\nnum_gpus = 8\nnum_gpu = 8\n', "unknown option"),
        ("device = [\n", "is no TOML"),
        ("num_gpus = 8\n[device]\nmemory_gib = 80\n", "device.bf16_tflops"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        find_cluster(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "memory", "number"),
    [
        ("mi300x64", 191.5, 64),
        ("mi300xx64", 191.5, 64),
        ("mi355x8", 287.5, 8),
        ("rtx-4090x2", 23.5, 2),
        ("gb300x144", 278, 144),
    ],
)
def test_devices_whose_name_ends_in_x_are_counted_both_ways(name, memory, number):
    cluster = find_cluster(name)
    assert (cluster.device.memory_gib, cluster.num_gpus) == (memory, number)


def test_every_known_device_is_whole():
    for name in known_devices():
        device = find_cluster(f"{name}x1").device
        assert device.sources and device.reached_per_s("bfloat16") > 0
        assert device.read_bytes_per_s < device.hbm_bytes_per_s
