"""`expertmesh bench comm`: measure bandwidth between the ranks that torchrun started, and store it for the cost
model."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from expertmesh.cli.parse import parsed
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.base import expanded, user_cache_dir
from expertmesh.config.fields import NewFile, Operation, Positive, Word
from expertmesh.config.output_file import check_folder, write_whole
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.comm.measure import LinkMeasurement
    from expertmesh.costs.communication import Network

CONNECT_TIMEOUT_S = 300.0
_LEAST_MIB, _MOST_MIB = 2.0**-12, 4096
_ASSUMED = " (assumed: these ranks have no such link to measure)"
COLORS = (
    "#0b6e99",
    "#c4632c",
    "#6b8e23",
    "#8a5aa5",
    "#b8860b",
    "#777777",
    "#a83254",
    "#2f4f4f",
    "#000000",
    "#aa0000",
)


class BenchVerb(Operation):
    """Benchmarks the links between the ranks of torchrun, or a server (bench serve).

    examples:
      torchrun --nproc-per-node 4 -m expertmesh bench comm
      torchrun --nproc-per-node 4 -m expertmesh bench comm --largest-mib 256 --plot bandwidth.svg --ranks-per-node 2
    """

    what: Annotated[Literal["comm", "serve"], Word]
    """comm: links between ranks; serve: see expertmesh bench serve --help"""
    largest_mib: Annotated[float, Field(ge=_LEAST_MIB, le=_MOST_MIB)] = 16.0
    """maximum message size per pair of ranks, in MiB"""
    plot: NewFile | None = None
    """SVG plot of the bandwidths to write"""
    cluster: NewFile | None = None
    """cluster file (from expertmesh doctor) to add the measured links to"""
    ranks_per_node: Positive | None = None
    """number of consecutive ranks per node (default: as torchrun started them)"""


def run(argv: list[str]) -> int:
    """Measure, print a table, and store the links for `--parallel.all-to-all auto` and `--parallel.adaptive`; returns
    0.

    Args:
        argv: words after `bench`; for `bench serve` see `bench_serve`.
    """
    if argv[:1] == ["serve"]:
        from expertmesh.cli.bench_serve import run as run_serve

        return run_serve(argv[1:])
    with once_per_host():
        options = parsed(BenchVerb, argv)
        if options.cluster is not None:
            from expertmesh.costs.hardware import find_cluster

            find_cluster(options.cluster)
        check_folder(user_cache_dir() / "comm")
    import torch

    from expertmesh.comm.measure import fit, measure
    from expertmesh.parallel.experts.tuning_cache import Topology, network_path, save_network
    from expertmesh.parallel.ranks import open_ranks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open_ranks(device_type=device, timeout_s=CONNECT_TIMEOUT_S) as ranks:
        world = ranks.world
        if world is None:
            raise ConfigError(
                "bench comm: there is one rank; start more with torchrun --nproc-per-node N -m expertmesh bench comm"
            )
        per_node = options.ranks_per_node
        nodes = world.nodes() if not per_node else [r // per_node for r in range(world.size)]
        sizes = [1 << n for n in range(8, 40, 2) if 1 << n <= options.largest_mib * (1 << 20)]
        points = list(measure(world, nodes, sizes))
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        topology, network = Topology.of(name, nodes), fit(points, nodes)
        cluster = None
        if options.cluster is not None:
            from expertmesh.cli.machine import (
                spread_steps,
                with_links,
                with_spread_steps,
                write_cluster,
            )

            cluster = with_links(options.cluster, network, max(map(nodes.count, nodes)))
            if device == "cpu" and cluster.software.host_s is not None:
                cluster = with_spread_steps(cluster, spread_steps(cluster, world))
        if not ranks.is_leader:
            return 0
        path = network_path(topology)
        save_network(path, network, [asdict(point) for point in points])
        written = [f"kept in {path}"]
        if cluster is not None and options.cluster is not None:
            written.append(f"links in {write_cluster(cluster, options.cluster)}")
        if options.plot is not None:
            write_whole(expanded(options.plot), plot(points))
            written.append(f"plot in {options.plot}")
        for text in (table(points), links(network), *written):
            print(text)
    return 0


def links(network: "Network") -> str:
    """Lines of text, one per class of links; assumed links are marked."""
    from expertmesh.costs.communication import assumed_links

    found = []
    for name, value in asdict(network).items():
        rate, latency = value["bytes_per_s"] / 1e6, value["latency_s"] * 1e6
        mark = _ASSUMED if name in assumed_links(network) else ""
        found.append(f"{name:8} {rate:10,.1f} MB/s, {latency:8,.1f} us per message{mark}")
    return "\n".join(found)


def table(points: Sequence["LinkMeasurement"]) -> str:
    """Table of MB/s of a rank by message size, with a column per algorithm and class of links."""
    columns = list(dict.fromkeys((p.algorithm, p.link) for p in points))
    found = {(p.algorithm, p.link, p.num_bytes): p.bus_bytes_per_s / 1e6 for p in points}
    lines = ["bytes".rjust(12) + "".join(f"{a}/{link}".rjust(19) for a, link in columns)]
    for size in dict.fromkeys(p.num_bytes for p in points):
        cells = "".join(f"{found[(*column, size)]:19,.1f}" for column in columns)
        lines.append(f"{size:12,}{cells}")
    return "\n".join(["MB/s that a rank hands to others", *lines])


def plot(points: Sequence["LinkMeasurement"], width: int = 760, height: int = 420) -> str:
    """SVG plot of the measurements, with logarithmic axes."""
    from math import log2

    left, bottom, right, top = 70, 50, 190, 20
    sizes = [log2(p.num_bytes) for p in points]
    rates = [log2(max(p.bus_bytes_per_s, 1.0)) for p in points]
    span = max(sizes) - min(sizes) or 1.0
    low, high = int(min(rates)), int(max(rates)) + 1

    def at(size: float, rate: float) -> tuple[float, float]:
        x = left + (width - left - right) * (size - min(sizes)) / span
        return x, height - bottom - (height - bottom - top) * (rate - low) / (high - low)

    parts = []
    for rate in range(low, high + 1, max((high - low) // 8, 1)):
        _, y = at(min(sizes), rate)
        text = f"{2**rate / 1e6:,.3g} MB/s"
        parts.append(f'<line x1="{left}" y1="{y:.0f}" x2="{width - right}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{text}</text>')
    for size in sorted(set(sizes)):
        x, _ = at(size, low)
        shown = f"{int(2**size) >> 10} KiB" if size >= 10 else f"{int(2**size)} B"
        parts.append(f'<text x="{x:.0f}" y="{height - bottom + 18}" text-anchor="middle">{shown}</text>')
    for i, column in enumerate(dict.fromkeys((p.algorithm, p.link) for p in points)):
        mine = [p for p in points if (p.algorithm, p.link) == column]
        path = " ".join("{:.1f},{:.1f}".format(*at(log2(p.num_bytes), log2(max(p.bus_bytes_per_s, 1.0)))) for p in mine)
        color, y = COLORS[i % len(COLORS)], top + 16 * i
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{width - right + 12}" y="{y}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{width - right + 28}" y="{y + 9}">{" ".join(column)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )
    foot = f'<text x="{left}" y="{height - 8}">bytes for each other rank</text></svg>'
    return "\n".join([head, *parts, foot, ""])
