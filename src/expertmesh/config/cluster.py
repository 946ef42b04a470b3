"""Cluster description: speed and memory of its devices and links. Numbers of known devices are in
costs/hardware.toml."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config
from expertmesh.errors import ConfigError

GIB, GB, TERA = 2**30, 1e9, 1e12
Precision = Literal["bfloat16", "float16", "float32", "float64", "float8"]


class LinkSpeed(Config):
    """Latency and bandwidth of a class of links.

    Example:
        >>> from expertmesh.config.cluster import LinkSpeed
        >>> LinkSpeed(latency_s=1.4e-6, gb_per_s=315).bytes_per_s
        315000000000.0
    """

    latency_s: float = Field(ge=0)
    """Seconds that one more message of a collective costs."""
    gb_per_s: float = Field(gt=0)
    """Bandwidth of one direction, per device, in 1e9 bytes."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of one direction, per device."""
        return self.gb_per_s * GB


class HostLink(Config):
    """Link from a device to host memory, and its share of that memory."""

    gb_per_s: float = Field(default=20.0, gt=0)
    """Bandwidth of one direction that one device reaches while all others of the node copy, too."""
    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of the host, divided by the devices of the node, that a run may use."""
    disk_gb_per_s: float = Field(default=3.0, gt=0)
    """Bandwidth of reading from the host's disk, per device, in 1e9 bytes."""
    adam_parameters_per_s: float = Field(default=1.6e8, gt=0)
    """Parameters that one rank's share of the host's cores updates in a second (docs/planner.md: 1.1 to 1.4e9 per node
    of 8)."""


class Device(Config):
    """Speed, memory and price of an accelerator, or of one rank's share of a CPU."""

    memory_gib: float = Field(gt=0)
    """Memory that a program can use, in 2^30 bytes."""
    bf16_tflops: float = Field(gt=0)
    """Peak of dense products in BF16 or FP16, in 1e12 operations per second."""
    fp8_tflops: float | None = Field(default=None, gt=0)
    """Peak of dense products in FP8, in 1e12 operations per second; none: the device has no FP8."""
    fp4_tflops: float | None = Field(default=None, gt=0)
    """Peak of dense products in FP4, in 1e12 operations per second; none: the device has no FP4."""
    tf32_tflops: float = Field(gt=0)
    """Peak of FP32 products in PyTorch, TF32 where the device has it, in 1e12 operations per second."""
    hbm_gb_per_s: float = Field(gt=0)
    """Bandwidth of the device's memory, in 1e9 bytes per second."""
    reach: float = Field(default=1.0, gt=0, le=2)
    """Share of its peak that products reach, beside the share that an H100's reach of its own."""
    read_share: float = Field(default=0.8, gt=0, le=1)
    """Share of the memory's bandwidth that products of few tokens reach when they read their weights."""
    rows_of_a_part: float = Field(default=128.0, ge=0)
    """Rows by which each expert's count is raised in the estimated time of its products: for partly full tiles, and for
    its weights."""
    usd_per_hour: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Lowest and highest price of one device for an hour; none: unknown."""
    sources: tuple[str, ...] = ()
    """Sources of the numbers."""

    def flops_per_s(self, precision: Precision) -> float:
        """Peak of dense products in one precision, per second; FP8 on a device without it counts as BF16."""
        if precision == "float64":
            fix = "use float32, bfloat16 or float16"
            raise ConfigError("precision", precision, "has no known rate on any device", fix)
        found = {
            "float32": self.tf32_tflops,
            "float8": self.fp8_tflops or self.bf16_tflops,
        }.get(precision, self.bf16_tflops)
        return found * TERA

    def reached_per_s(self, precision: Precision) -> float:
        """Peak of dense products beside which software is as efficient as beside an H100's, per second."""
        return self.reach * self.flops_per_s(precision)

    @property
    def hbm_bytes_per_s(self) -> float:
        """Bandwidth of the device's memory, in bytes per second."""
        return self.hbm_gb_per_s * GB

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes per second that products of few tokens read."""
        return self.read_share * self.hbm_bytes_per_s


class Software(Config):
    """Measured efficiency of software on a cluster; for an option that is none, the value fitted on published rows
    counts."""

    dense: float | None = Field(default=None, gt=0, le=2)
    """Share of the peak that large dense products reach."""
    grouped: float | None = Field(default=None, gt=0, le=2)
    """Share of the peak that products of experts reach when their tiles are full."""
    network: float | None = Field(default=None, gt=0, le=2)
    """Share of the links' bandwidth that collectives reach."""
    element_bytes: float | None = Field(default=None, ge=0)
    """Bytes that element-wise kernels move per token, layer and element of D, forward and backward."""
    host_s: float | None = Field(default=None, ge=0)
    """CPU seconds per layer and micro-batch, forward and backward."""
    hidden: float | None = Field(default=None, ge=0, le=1)
    """Share of the communication that could overlap with products that is hidden by them."""


class Cluster(Config):
    """Equal devices in equal nodes.

    Example:
        >>> from expertmesh.costs.hardware import find_cluster
        >>> cluster = find_cluster("h100x64")
        >>> cluster.num_gpus, cluster.ranks_per_node, cluster.num_nodes
        (64, 8, 8)
    """

    name: str
    """Name of the cluster, for display."""
    num_gpus: int = Field(gt=0, le=2**20)
    """Number of devices."""
    device: Device
    """The device, the same everywhere."""
    ranks_per_node: int = Field(default=8, gt=0)
    """Devices that the inside link joins: a node, or a rack of NVL72."""
    inside: LinkSpeed
    """Links between devices of a node, per device."""
    across: LinkSpeed
    """Links between nodes, per device."""
    host: HostLink = HostLink()
    """Link between a device and its host."""
    software: Software = Software()
    """Measured efficiency of software on this cluster."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        per_node, number = self.ranks_per_node, self.num_gpus
        self.require(
            number <= per_node or number % per_node == 0,
            "num_gpus",
            f"must be at most ranks_per_node, {per_node}, or a multiple of it",
            f"use {max(per_node, number // per_node * per_node)}",
        )
        return self

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.num_gpus // self.ranks_per_node)

    @property
    def node_size(self) -> int:
        """Devices of one node."""
        return min(self.ranks_per_node, self.num_gpus)
