"""A cluster: what its devices can do and what joins them. Numbers of known devices are in costs/hardware.toml."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config

GIB, GB, TERA = 2**30, 1e9, 1e12
Precision = Literal["bfloat16", "float16", "float32", "float8"]


class LinkSpeed(Config):
    """One class of links.

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
    """What joins a device with the memory of its host, and how much of that it has."""

    gb_per_s: float = Field(default=20.0, gt=0)
    """Bandwidth of one direction that one device reaches while all others of the node copy, too."""
    memory_gib: float = Field(default=0.0, ge=0)
    """Memory of the host, divided by the devices of the node, that a run may use."""
    adam_parameters_per_s: float = Field(default=1.6e8, gt=0)
    """Parameters that one rank's share of the host's cores updates in a second (docs/planner.md: 1.1 to 1.4e9 per node of 8)."""


class Device(Config):
    """One accelerator, or one rank's share of a CPU."""

    memory_gib: float = Field(gt=0)
    """Memory that a program can have, in 2^30 bytes."""
    bf16_tflops: float = Field(gt=0)
    """Peak of dense products in BF16 or FP16, in 1e12 operations per second."""
    fp8_tflops: float | None = Field(default=None, gt=0)
    """The same in FP8; none: the device has none."""
    tf32_tflops: float = Field(gt=0)
    """The same of FP32 products as PyTorch does them, TF32 where the device has it."""
    hbm_gb_per_s: float = Field(gt=0)
    """Bandwidth of its memory, in 1e9 bytes per second."""
    rows_of_a_part: float = Field(default=128.0, ge=0)
    """Rows by which an expert's products take longer than their operations say: a tile that is not full, weights that are read."""
    usd_per_hour: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Lowest and highest price of one device for an hour; none: unknown."""
    sources: tuple[str, ...] = ()
    """Where the numbers are from."""

    def flops_per_s(self, precision: Precision) -> float:
        """Peak of dense products in one precision; FP8 where there is none is BF16."""
        found = {
            "float32": self.tf32_tflops,
            "float8": self.fp8_tflops or self.bf16_tflops,
        }.get(precision, self.bf16_tflops)
        return found * TERA

    @property
    def hbm_bytes_per_s(self) -> float:
        """Bandwidth of its memory."""
        return self.hbm_gb_per_s * GB


class Software(Config):
    """What software reaches of a cluster's numbers, where that was measured there; what is none is as fitted on published rows."""

    dense: float | None = Field(default=None, gt=0)
    """Of the peak, large dense products."""
    grouped: float | None = Field(default=None, gt=0)
    """Of the peak, products of experts whose tiles are full."""
    network: float | None = Field(default=None, gt=0)
    """Of the links' bandwidth."""
    element_bytes: float | None = Field(default=None, ge=0)
    """Moved by element-wise kernels per token, layer and element of D, forward and backward."""
    host_s: float | None = Field(default=None, ge=0)
    """Of the CPU per layer and micro-batch, forward and backward."""
    hidden: float | None = Field(default=None, ge=0, le=1)
    """Of communication that could overlap, what does."""


class Cluster(Config):
    """Equal devices in equal nodes.

    Example:
        >>> from expertmesh.costs.hardware import find_cluster
        >>> cluster = find_cluster("h100x64")
        >>> cluster.num_gpus, cluster.ranks_per_node, cluster.num_nodes
        (64, 8, 8)
    """

    name: str
    """For people."""
    num_gpus: int = Field(gt=0, le=2**20)
    """Devices in all."""
    device: Device
    """Each of them."""
    ranks_per_node: int = Field(default=8, gt=0)
    """Devices that the inside link joins: a node, or a rack of NVL72."""
    inside: LinkSpeed
    """Between devices of a node, per device."""
    across: LinkSpeed
    """Between nodes, per device."""
    host: HostLink = HostLink()
    """Between a device and its host."""
    software: Software = Software()
    """What software reaches of all this."""

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
        """Nodes in all."""
        return -(-self.num_gpus // self.ranks_per_node)

    @property
    def node_size(self) -> int:
        """Devices of one node."""
        return min(self.ranks_per_node, self.num_gpus)
