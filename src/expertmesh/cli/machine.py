"""Cluster file of this machine, measured while all of its ranks compute. `bench comm` adds the links."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from expertmesh.comm.cores import allowed_cores
from expertmesh.config.base import expanded
from expertmesh.config.cluster import GB, GIB, TERA, Cluster, Device, HostLink, LinkSpeed, Software
from expertmesh.config.output_file import output_file, write_whole
from expertmesh.costs.communication import Network
from expertmesh.costs.hardware import find_cluster, known_devices
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.step_time import Efficiency, RawStep, efficiency_of, raw_step
from expertmesh.models.registry import find_family, recipe
from expertmesh.planner.configured import configured_layout
from expertmesh.planner.fit import Row, fit_rows
from expertmesh.planner.planned_model import planned_model

if TYPE_CHECKING:
    from torch import nn

    from expertmesh.comm.world import World

_PIECE_S, _STEPS = 0.3, 8
_SMALL = {"model.dim": 64, "model.num_layers": 2, "model.num_heads": 2, "model.ffn_hidden_dim": 128}
_DEEP = {"model.dim": 128, "model.num_layers": 4, "model.num_heads": 4, "model.moe.num_experts": 8}
_WIDE = {"model.dim": 256, "model.num_layers": 2, "model.num_heads": 4, "model.vocab_size": 1024}
CALIBRATION: tuple[tuple[dict[str, Any], int, int], ...] = (
    (_SMALL, 2, 64),
    (_DEEP, 8, 128),
    (_WIDE | {"model.moe.num_experts": (), "model.ffn_hidden_dim": 1024}, 8, 128),
    (_WIDE | {"model.moe.num_experts": 8, "model.moe.hidden_dim": 512}, 8, 128),
)
"""Changes to gpt-moe-test with number and length of sequences; their step times calibrate launch and element-wise
costs."""
CPU_BOUNDS = {
    "dense": (0.2, 1.2),
    "grouped": (0.1, 1.2),
    "element_bytes": (10.0, 3000.0),
    "host_s": (1e-5, 0.2),
}
CPU_USUAL = Efficiency(dense=0.8, grouped=0.6, network=1.0, element_bytes=200.0, host_s=2e-3, hidden=0.3)


def measured_cluster(world: "World | None", nodes: list[int], name: str) -> Cluster:
    """Measured cluster of the ranks of a world, all measuring at once; each number is the minimum over ranks."""
    import torch

    is_gpu = torch.cuda.is_available()
    own = _gpu() if is_gpu else _cpu(max(map(nodes.count, nodes)))
    own = {key: _least(world, value) for key, value in own.items()}
    number, per_node = len(nodes), max(map(nodes.count, nodes))
    known = _known_gpu() if is_gpu else "cpu"
    usual = find_cluster(f"{known}x1")
    device = usual.device.model_copy(
        update={
            "memory_gib": own["memory_gib"],
            "bf16_tflops": own["bf16_tflops"],
            "tf32_tflops": own["tf32_tflops"],
            "hbm_gb_per_s": own["hbm_gb_per_s"],
            "sources": ("measured by expertmesh doctor",),
        }
    )
    cluster = Cluster(
        name=name,
        num_gpus=number,
        device=device,
        ranks_per_node=per_node,
        inside=usual.inside,
        across=usual.across,
        host=usual.host,
    )
    if is_gpu:
        return cluster
    found = _calibrated(cluster, world)
    return cluster.model_copy(update={"software": found})


def _least(world: "World | None", value: float) -> float:
    if world is None:
        return value
    import torch

    from expertmesh.comm.collectives import all_gather

    number = torch.tensor([value], dtype=torch.float64, device=world.device_type)
    return float(all_gather(number, world.all_ranks(), where="what ranks reach").min())


def _repeated(run: Callable[[], object], is_gpu: bool) -> float:
    """Median time of a function, in seconds of the device or, on a CPU, of this process's cores."""
    import torch

    times: list[float] = []
    run()
    ends = time.perf_counter() + _PIECE_S
    while len(times) < 3 or time.perf_counter() < ends:
        if is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter() if is_gpu else _cpu_s()
        run()
        if is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() if is_gpu else _cpu_s()) - began)
    return median(times)


def _cpu_s() -> float:
    """CPU seconds of this process per thread, so that other processes are not counted."""
    import torch

    return time.process_time() / torch.get_num_threads()


def _share(per_node: int) -> float:
    """Share of a core that each thread has, if the ranks of a node have more threads than cores."""
    import torch

    return min(1.0, len(allowed_cores()) / (per_node * torch.get_num_threads()))


def _products(size: int, dtype: Any, device: str) -> float:
    """Speed of a square matmul, in 1e12 operations per second."""
    import torch

    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _repeated(lambda: a @ b, device == "cuda") / TERA


def _bandwidth(num_bytes: int, device: str) -> float:
    """Memory bandwidth of reading two arrays and writing one, in 1e9 bytes per second."""
    import torch

    x, y = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    return 3 * num_bytes / _repeated(lambda: torch.add(x, y, out=x), device == "cuda") / GB


def _cpu(per_node: int) -> dict[str, float]:
    import torch

    text = Path("/proc/meminfo").read_text()
    share = _share(per_node)
    total = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemTotal"))
    return {
        "memory_gib": total / 2**20 / per_node,
        "bf16_tflops": share * _products(512, torch.bfloat16, "cpu"),
        "tf32_tflops": share * _products(512, torch.float32, "cpu"),
        "hbm_gb_per_s": share * _bandwidth(1 << 26, "cpu"),
    }


def _gpu() -> dict[str, float]:
    """Memory of the GPU and the vendor's peaks, of which fitted constants are shares."""
    import torch

    usual = find_cluster(f"{_known_gpu()}x1").device
    return {
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB,
        "bf16_tflops": usual.bf16_tflops,
        "tf32_tflops": usual.tf32_tflops,
        "hbm_gb_per_s": usual.hbm_gb_per_s,
    }


def _known_gpu() -> str:
    """Device of hardware.toml that is most like this one, by name, then by memory."""
    import torch

    name = torch.cuda.get_device_name().lower()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    alike = [key for key in known_devices() if key.partition("-")[0] in name] or ["h100"]
    return min(alike, key=lambda key: abs(known_devices()[key]["memory_gib"] - memory))


def _calibrated(cluster: Cluster, world: "World | None") -> Software:
    """Constants fitted to the steps of some small models on one rank, while other ranks run the same."""
    alone = cluster.model_copy(update={"num_gpus": 1, "ranks_per_node": 1})
    rows = []
    for changes, sequences, length in CALIBRATION:
        lengths = {"model.max_seq_len": length, "data.seq_len": length}
        config = recipe("gpt-moe-test", {**changes, **lengths})
        work = Workload(length, precision="float32", stack="eager")
        layout = RankLayout(1, micro_batch=sequences)
        raw = raw_step(planned_model(config).sizes, layout, work, alone)
        seconds = _step_s(config, sequences, length) / _share(cluster.ranks_per_node)
        rows.append((raw, -_least(world, -seconds)))
    e = fit_rows(rows, usual=CPU_USUAL, bounds=CPU_BOUNDS)
    given = {name: getattr(e, name) for name in CPU_BOUNDS}
    return Software(**given, network=1.0, hidden=CPU_USUAL.hidden)


def _step_s(config: Any, sequences: int, length: int, world: "World | None" = None) -> float:
    """Median time of an FP32 AdamW step of a language model with `sequences` on this rank; sharded if a world is
    given."""
    import torch

    builder = find_family(config.family).open_task(config).builder
    model: nn.Module = builder.build(device="cpu", dtype=torch.float32)
    if world is not None:
        builder.spread(model, world)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.model.vocab_size, (sequences, length + 1))
    times = []
    for _ in range(_STEPS + 2):
        began = _cpu_s()
        logits = model(ids[:, :-1]).logits_BSV
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(_cpu_s() - began)
    return median(times[2:])


def spread_steps(cluster: Cluster, world: "World") -> list[Row]:
    """Step times of the calibration models sharded over these ranks, for `with_spread_steps`. Every rank must call."""
    rows = []
    for raw, (config, sequences, length) in spread_models(cluster, world.size):
        seconds = _step_s(config, sequences, length, world) / _share(cluster.ranks_per_node)
        rows.append((raw, -_least(world, -seconds)))
    return rows


def spread_models(cluster: Cluster, num_ranks: int) -> Iterator[tuple[RawStep, tuple[Any, int, int]]]:
    """Calibration models for a number of ranks: raw costs of a step; configuration, sequences per rank and their
    length."""
    for changes, sequences, length in CALIBRATION:
        sizes = {
            "model.max_seq_len": length,
            "data.seq_len": length,
            "train.batch_size": sequences * num_ranks,
        }
        config = recipe("gpt-moe-test", {**changes, **sizes})
        layout = configured_layout(config, num_ranks)
        assert layout is not None, "whole sequences on each rank"
        work = Workload(length, precision="float32", stack="eager")
        raw = raw_step(planned_model(config).sizes, layout, work, cluster)
        yield raw, (config, sequences, length)


def with_spread_steps(cluster: Cluster, rows: Sequence[Row]) -> Cluster:
    """Measured CPU cluster whose host time per layer is fitted to sharded models.

    A single rank has no collectives; their hooks, copies and waiting for the slowest rank cost host time per layer,
    which grows with the number of ranks.
    """
    usual = efficiency_of(cluster, CPU_USUAL)
    e = fit_rows(rows, usual=usual, bounds={"host_s": CPU_BOUNDS["host_s"]})
    software = cluster.software.model_copy(update={"host_s": e.host_s})
    return cluster.model_copy(update={"software": software})


def with_links(path: str, network: Network, per_node: int) -> Cluster:
    """Cluster of a cluster file with measured links; unmeasured links are unchanged."""
    from expertmesh.costs.communication import assumed_links

    cluster, assumed = find_cluster(path), assumed_links(network)
    links = {
        "inside": (network.inside.latency_s, network.inside.bytes_per_s / GB),
        "across": (network.across.latency_s, network.across.bytes_per_s / per_node / GB),
    }
    measured = {
        name: LinkSpeed(latency_s=latency, gb_per_s=rate)
        for name, (latency, rate) in links.items()
        if name not in assumed
    }
    return cluster.model_copy(update=measured)


def write_cluster(cluster: Cluster, path: str) -> Path:
    """Write a cluster file."""
    target = output_file("cluster", path)
    write_whole(target, cluster_toml(cluster))
    return target


def cluster_toml(cluster: Cluster) -> str:
    """TOML text of a cluster, for `find_cluster`."""
    lines = [
        f'name = "{cluster.name}"',
        f"num_gpus = {cluster.num_gpus}",
        f"ranks_per_node = {cluster.ranks_per_node}",
    ]
    for name in ("device", "inside", "across", "host", "software"):
        section: Device | LinkSpeed | HostLink | Software = getattr(cluster, name)
        lines += ["", f"[{name}]"]
        for key, value in section.model_dump().items():
            if value is not None and value != ():
                lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:.6g}"


def name_of(path: str) -> str:
    """Name of a cluster from its file's name, without invalid characters."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in expanded(path).stem)
