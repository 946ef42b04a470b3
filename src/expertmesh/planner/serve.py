"""Costs of generating with a model on a cluster: time per token by part, memory, throughput, price per million tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from expertmesh.config.cluster import Cluster
from expertmesh.config.values import check_choice
from expertmesh.costs.communication import Network, TokenLoad, travel_time
from expertmesh.costs.hardware import network_of
from expertmesh.costs.memory import GIB
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.costs.sizes import LayerSizes, ModelSizes
from expertmesh.costs.step_time import HBM, Efficiency, route_of
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.arguments import MOST_AT_ONCE, cluster_of, whole
from expertmesh.planner.planned_model import PlannedModel, planned_model
from expertmesh.planner.search import TENSOR_DEGREES, can_slice, routes_over

HOST_S = 1.1e-4
"""CPU seconds per layer and step, with a launch per operation: Qwen3-30B on one A100, 9.6 ms for a token of 48 layers."""
FUSED_HOST_S = 2e-5
"""CPU seconds per layer and step, with CUDA graphs."""
EXCHANGE_S = 2e-5
"""Seconds of a dispatch or combine beyond its bytes' time: DeepEP's low-latency kernels, 77 us for 46 us of bytes on 8 ranks."""
REDUCE_S = 1.6e-5
"""Seconds of a small all-reduce over the devices of a node (ai-dynamo/aiconfigurator: 15.7 us on 8 H100)."""
WORKSPACE_BYTES = 3.5 * GIB
"""Bytes of a server beside weights and cache: context, buffers, graphs (ai-dynamo/aiconfigurator)."""


@dataclass(frozen=True)
class TokenSeconds:
    """Seconds of one step of generation by part.

    Attributes:
        weights_s: reading dense weights and weights of experts that some token chose.
        cache_s: reading keys and values.
        products_s: time of products beyond reading weights.
        exchange_s: dispatch and combine of tokens.
        tensor_s: all-reduces of tensor parallelism.
        host_s: kernel launches of the CPU.
    """

    weights_s: float
    cache_s: float
    products_s: float
    exchange_s: float
    tensor_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """Seconds of a step, one token of every sequence."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Serving:
    """A layout for generation, with its memory and time.

    Attributes:
        sizes: sizes of the model.
        cluster: the cluster.
        batch: sequences that are generated at once, on all devices.
        context: tokens of each sequence.
        tp_degree: devices that share the dense layers of a sequence.
        route_degree: devices over which the experts are spread; copies of this group generate separately.
        weight_bytes: bytes of a parameter.
        cache_bytes: bytes of an element of keys and values.
        fused: whether steps are replayed from CUDA graphs.
    """

    sizes: ModelSizes
    cluster: Cluster
    batch: int
    context: int
    tp_degree: int
    route_degree: int
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    fused: bool = False

    @property
    def local_batch(self) -> float:
        """Sequences of one tensor-parallel group, at least one."""
        return max(self.batch * self.tp_degree / self.cluster.num_gpus, 1.0)

    @property
    def routed_batch(self) -> float:
        """Tokens of a step on the devices that share one set of experts, at most one of each sequence."""
        return min(self.local_batch * self.route_degree / self.tp_degree, self.batch)

    def experts_touched(self, block: LayerSizes) -> float:
        """Expected number of a layer's experts on one device that some token of a step chose."""
        if not block.num_experts:
            return 0.0
        here = block.num_experts / self.route_degree
        untouched = (1 - block.rows_per_token / block.num_experts) ** self.routed_batch
        return here * (1 - untouched)

    @cached_property
    def weights_held_bytes(self) -> float:
        """Bytes of weights of one device."""
        experts = self.sizes.expert_parameters / self.route_degree
        return (self.sizes.dense_parameters / self.tp_degree + experts) * self.weight_bytes

    @cached_property
    def cache_held_bytes(self) -> float:
        """Bytes of keys and values of one device."""
        return self.local_batch * self.context * self._cache_per_token()

    def _cache_per_token(self) -> float:
        """Bytes of keys and values of a token on one device."""
        return sum(block.count * self._cache_of_layer(block) for block in self.sizes.blocks)

    def _cache_of_layer(self, block: LayerSizes) -> float:
        """Bytes of keys and values of a token and layer on one device; latents that all heads share are on each device."""
        return block.cache_width * self.cache_bytes / max(min(self.tp_degree, block.cache_heads), 1)

    @cached_property
    def device_bytes(self) -> float:
        """Bytes that one device must have in all."""
        workspace = min(WORKSPACE_BYTES, 0.1 * self.cluster.device.memory_gib * GIB)
        return self.weights_held_bytes + self.cache_held_bytes + workspace

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.device_bytes <= self.cluster.device.memory_gib * GIB

    @cached_property
    def seconds(self) -> TokenSeconds:
        """Seconds of one step, by part."""
        device, e = self.cluster.device, Efficiency()
        hbm, b = HBM * device.hbm_bytes_per_s, self.weight_bytes
        precision = "float32" if b == 4 else "float8" if b == 1 else "bfloat16"
        peak = device.flops_per_s(precision)  # type: ignore[arg-type]
        tokens, sizes = self.local_batch, self.sizes
        weights = cache = products = exchange = tensor = 0.0
        for block in sizes.blocks:
            n = block.count
            dense = block.dense_parameters / self.tp_degree
            touched = self.experts_touched(block) * block.expert_parameters
            read = (dense + touched) * b / hbm
            rows = self.routed_batch * block.rows_per_token / max(self.route_degree, 1)
            flops = 2 * (tokens * dense + rows * block.expert_parameters)
            weights += n * read
            products += n * max(0.0, flops / (e.dense * peak) - read)
            seen = min(self.context, block.window or self.context)
            cache += n * tokens * seen * self._cache_of_layer(block) / hbm
            tensor += n * self._tensor_s()
            if block.num_experts:
                exchange += n * self._exchange_s(block)
        weights += sizes.vocab_size * sizes.dim * b / self.tp_degree / hbm
        layers = sizes.num_layers
        return TokenSeconds(
            weights_s=weights,
            cache_s=cache,
            products_s=products,
            exchange_s=exchange,
            tensor_s=tensor,
            host_s=layers * (FUSED_HOST_S if self.fused else HOST_S),
        )

    def _tensor_s(self) -> float:
        if self.tp_degree == 1:
            return 0.0
        moved = 2 * self.local_batch * self.sizes.dim * 2 / self.cluster.inside.bytes_per_s
        return 2 * (REDUCE_S + moved)

    def _exchange_s(self, block: LayerSizes) -> float:
        if self.route_degree <= self.tp_degree:
            return 0.0
        slices = RankLayout.slices(block.num_experts, self.route_degree)
        route = route_of(self.route_degree, slices, self.cluster.node_size)
        load = TokenLoad.even(
            self.local_batch / self.tp_degree,
            max(1, round(block.rows_per_token)),
            block.num_experts,
        )
        # Messages of one all-to-all overlap: only their bytes add up.
        inside, across = network_of(self.cluster).inside, network_of(self.cluster).across
        network = Network(replace(inside, latency_s=0.0), replace(across, latency_s=0.0))
        time = travel_time(
            "flat",
            route,
            replace(load, merges=False),
            network,
            dim=self.sizes.dim,
            element_bytes=2,
            out_bytes=self.sizes.dim if self.weight_bytes == 1 else None,
        )
        return time.total_s + 2 * EXCHANGE_S

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences."""
        return self.batch / self.seconds.total_s

    @property
    def usd_per_million(self) -> tuple[float, ...]:
        """Lowest and highest price of a million generated tokens; empty: the device has no price."""
        number = self.cluster.num_gpus
        return tuple(
            price * number / (3600 * self.tokens_per_s) * 1e6
            for price in self.cluster.device.usd_per_hour
        )


def servings(
    model: PlannedModel,
    cluster: Cluster,
    *,
    batch: int,
    context: int,
    weight_bytes: float,
    fused: bool,
) -> Iterator[Serving]:
    """All layouts for generation that the engine accepts, whether they fit or not."""
    has_experts = any(block.num_experts for block in model.sizes.blocks)
    for tp in TENSOR_DEGREES:
        if tp > cluster.node_size or cluster.num_gpus % tp or model.sizes.tensor_divisor % tp:
            continue
        for route in routes_over(cluster.num_gpus) if has_experts else [tp]:
            if route % tp == 0 and can_slice(model.sizes, route):
                yield Serving(
                    model.sizes,
                    cluster,
                    batch,
                    context,
                    tp,
                    route,
                    weight_bytes=weight_bytes,
                    cache_bytes=weight_bytes,
                    fused=fused,
                )


@dataclass(frozen=True)
class ServePlan:
    """Layouts for generation that fit.

    Attributes:
        model: the model.
        ways: layouts that fit, fastest first.
        guesses: guessed inputs, in words.
    """

    model: PlannedModel
    ways: tuple[Serving, ...]
    guesses: tuple[str, ...]

    @property
    def best(self) -> Serving:
        """The fastest layout."""
        return self.ways[0]


def serve_plan(
    model: str | Path | GPTRunConfig,
    *,
    cluster: str | Path | Cluster,
    batch: int,
    context: int,
    fused: bool = False,
) -> ServePlan:
    """Plan generation with a model on a cluster: time per token, throughput, price, memory. Imports no torch.

    Args:
        model: see `expertmesh.plan`.
        cluster: see `expertmesh.plan`.
        batch: sequences at once, on all devices.
        context: tokens of each sequence.
        fused: whether steps are replayed from CUDA graphs; this project's engine launches each operation.

    Raises:
        ConfigError: a value breaks a rule, or the model fits nowhere.

    Example:
        >>> from expertmesh.planner.serve import serve_plan
        >>> best = serve_plan("qwen3-30b", cluster="h100x1", batch=1, context=1000).best
        >>> best.seconds.total_s < 0.02
        True
    """
    batch = whole("batch", batch, most=MOST_AT_ONCE, fix="choose another")
    context = whole("context", context, most=MOST_AT_ONCE, fix="choose another")
    check_choice("fused", fused, (True, False))
    found, where = planned_model(model), cluster_of(cluster)
    weight_bytes = 4.0 if where.device.bf16_tflops < 10 else 2.0
    ways = [
        *servings(
            found, where, batch=batch, context=context, weight_bytes=weight_bytes, fused=fused
        )
    ]
    fitting = sorted((w for w in ways if w.fits), key=lambda w: (w.seconds.total_s, w.device_bytes))
    if not fitting:
        least = min(ways, key=lambda w: w.device_bytes)
        raise ConfigError(
            f"plan {found.name} on {where.name}: generating {batch} sequences of {context} tokens needs"
            f" {least.device_bytes / GIB:.1f} GiB of a device's {where.device.memory_gib:.1f}, of them"
            f" {least.cache_held_bytes / GIB:.1f} for keys and values; use more devices, fewer sequences or shorter ones"
        )
    guesses = (
        *found.unread,
        f"weights, keys and values in {'FP32' if weight_bytes == 4 else 'BF16'}",
        "even routing, and sequences of equal length",
        f"{1e6 * (FUSED_HOST_S if fused else HOST_S):.0f} us of the CPU per layer and step",
    )
    return ServePlan(found, tuple(fitting), guesses)
