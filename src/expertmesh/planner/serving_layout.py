"""A layout for generation: time per token by part, prefill, memory, throughput, price per million tokens."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

from expertmesh.config.cluster import Cluster
from expertmesh.costs.communication import Network, TokenLoad, travel_time
from expertmesh.costs.graph_memory import captured_bytes
from expertmesh.costs.hardware import network_of
from expertmesh.costs.memory import GIB
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.costs.sizes import LayerSizes, ModelSizes
from expertmesh.costs.step_time import ATTENTION, FP8_SHARE, Efficiency, route_of
from expertmesh.costs.weight_formats import FORMATS, FormatName, Weights

EXCHANGE_S = 2e-5
"""Seconds of a dispatch or combine beyond its bytes' time: DeepEP's low-latency kernels, 77 us for 46 us of bytes on 8
ranks."""
REDUCE_S = 1.6e-5
"""Seconds of a small all-reduce over the devices of a node (ai-dynamo/aiconfigurator: 15.7 us on 8 H100)."""
WORKSPACE_BYTES = 3.5 * GIB
"""Bytes of a server beside weights and cache: context, buffers, graphs (ai-dynamo/aiconfigurator)."""

_BLOCK = 32
"""Tokens of a block of the cache."""


@dataclass(frozen=True)
class Overheads:
    """Seconds of generation beyond bytes and products, set with the rows marked `fit` in sight."""

    eager_s: float = 1.2e-4  # of a layer, launched operation by operation (row tt-qwen3-30b-a100 of published.toml)
    fused_s: float = 6e-5  # of a layer in a graph: beginnings and ends of its kernels (row ix-r1-8)
    # of each sequence of a device: scheduling, sampling, small kernels (row ix-gpt-oss-120b-256)
    sequence_s: float = 1.4e-4


@dataclass(frozen=True)
class TokenSeconds:
    """Seconds of one step of generation by part."""

    weights_s: float  # reading dense weights and weights of experts that some token chose
    fetches_s: float  # copying experts that no slot has, from the host's memory or from a disk
    cache_s: float  # reading keys and values
    products_s: float  # time of products beyond reading weights
    exchange_s: float  # dispatch and combine of tokens
    tensor_s: float  # all-reduces of tensor parallelism
    host_s: float  # launches, and beginnings and ends of kernels
    sequences_s: float  # scheduling and sampling of each sequence

    @property
    def total_s(self) -> float:
        """Seconds of a step, one token of every sequence."""
        result: float = sum(getattr(self, f.name) for f in fields(self))
        return result


@dataclass(frozen=True)
class Serving:
    """A layout for generation, with its memory and time."""

    sizes: ModelSizes
    cluster: Cluster
    batch: int  # sequences that are generated at once, on all devices
    context: int  # tokens of each sequence, for which there is room
    tp_degree: int  # devices that share the dense layers of a sequence
    route_degree: int  # devices over which the experts are spread; copies of this group generate separately
    weights: Weights = Weights()  # formats of the weights
    cache_bytes: float = 2.0  # bytes of an element of keys and values
    fused: bool = False  # whether steps are replayed from CUDA graphs
    expert_slots: int | None = None  # experts of a layer that a device holds; None: all of its own
    redundant: int = 0  # copies of experts in each layer, beside the experts
    # whether two halves of the sequences take turns, so that the exchange of one hides under the other's work
    overlaps: bool = False
    prompt: int = 0  # tokens of a prompt; 0: prompts are not counted
    answer: int = 1  # tokens of an answer
    overheads: Overheads = Overheads()  # seconds beyond bytes and products

    @property
    def layer_s(self) -> float:
        """Seconds of a layer beyond bytes and products."""
        return self.overheads.fused_s if self.fused else self.overheads.eager_s

    @property
    def local_batch(self) -> float:
        """Sequences of one tensor-parallel group, at least one."""
        return max(self.batch * self.tp_degree / self.cluster.num_gpus, 1.0)

    @property
    def routed_batch(self) -> float:
        """Tokens of a step on the devices that share one set of experts, at most one of each sequence."""
        return min(self.local_batch * self.route_degree / self.tp_degree, self.batch)

    @property
    def _seen(self) -> float:
        """Tokens of a sequence in the middle of its answer."""
        return self.prompt + self.answer / 2 if self.prompt else self.context

    def experts_held(self, block: LayerSizes) -> int:
        """Number of a layer's experts with their copies; software with graphs copies experts that devices do not
        divide."""
        if not block.num_experts:
            return 0
        rest = -block.num_experts % self.route_degree if self.fused else 0
        return block.num_experts + (self.redundant or rest)

    def experts_here(self, block: LayerSizes) -> float:
        """Number of a layer's experts, copies included, of one device."""
        return self.experts_held(block) / self.route_degree

    def experts_touched(self, block: LayerSizes) -> float:
        """Expected number of a layer's experts on one device that some token of a step chose."""
        here = self.experts_here(block)
        if not here:
            return 0.0
        untouched = 1 - block.rows_per_token / self.experts_held(block)
        result: float = here * (1 - untouched**self.routed_batch)
        return result

    def _held(self, block: LayerSizes) -> float:
        here = self.experts_here(block)
        return here if self.expert_slots is None else min(here, self.expert_slots)

    @cached_property
    def weights_held_bytes(self) -> float:
        """Bytes of weights of one device."""
        sizes, w = self.sizes, self.weights
        found = sizes.outside_parameters * w.bytes_of("embedding") / self.tp_degree
        for block in sizes.blocks:
            experts = self._held(block) * block.expert_parameters * w.bytes_of("experts")
            found += block.count * (self._dense_bytes(block) / self.tp_degree + experts)
        return found

    @cached_property
    def away_bytes(self) -> float:
        """Bytes of one device's experts that have no slot."""
        return sum(
            block.count
            * (self.experts_here(block) - self._held(block))
            * block.expert_parameters
            * self.weights.bytes_of("experts")
            for block in self.sizes.blocks
        )

    @property
    def is_on_disk(self) -> bool:
        """Whether experts without a slot are read from a disk: the host has no memory for them."""
        return self.away_bytes > self.cluster.host.memory_gib * GIB

    def _dense_bytes(self, block: LayerSizes) -> float:
        """Bytes of a layer's weights beside its experts; what is neither attention nor dense is in BF16."""
        small = block.dense_parameters - block.attention_elements - block.dense_elements
        attention = block.attention_elements * self.weights.bytes_of("attention")
        return attention + block.dense_elements * self.weights.bytes_of("dense") + 2 * small

    @cached_property
    def cache_held_bytes(self) -> float:
        """Bytes of keys and values of one device."""
        each = (
            block.count * self._cache_of_layer(block) * min(self.context, block.window or self.context)
            for block in self.sizes.blocks
        )
        return self.local_batch * sum(each)

    def _cache_of_layer(self, block: LayerSizes) -> float:
        """Bytes of keys and values of a token and layer on one device; latents that all heads share are on each
        device."""
        return block.cache_width * self.cache_bytes / max(min(self.tp_degree, block.cache_heads), 1)

    @cached_property
    def captured_bytes(self) -> float:
        """Bytes of one device's captured steps; 0: each operation is launched."""
        if not self.fused:
            return 0.0
        blocks = -(-self.context // _BLOCK)
        sizes = {"num_layers": self.sizes.num_layers, "vocab_size": self.sizes.vocab_size}
        return captured_bytes(round(self.local_batch), **sizes, num_blocks=blocks)

    @cached_property
    def device_bytes(self) -> float:
        """Bytes that one device must have in all."""
        workspace = min(WORKSPACE_BYTES, 0.1 * self.cluster.device.memory_gib * GIB)
        held = self.weights_held_bytes + self.cache_held_bytes
        return held + max(workspace, self.captured_bytes)

    @property
    def filled(self) -> float:
        """Share of the device's memory that is in use."""
        return self.device_bytes / (self.cluster.device.memory_gib * GIB)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.filled <= 1

    @cached_property
    def seconds(self) -> TokenSeconds:
        """Seconds of one step, by part."""
        hbm = self.cluster.device.read_bytes_per_s
        host = self.cluster.host
        away = (host.disk_gb_per_s if self.is_on_disk else host.gb_per_s) * 1e9
        tokens, sizes, w = self.local_batch, self.sizes, self.weights
        weights = fetches = cache = products = exchange = tensor = 0.0
        for block in sizes.blocks:
            n, touched = block.count, self.experts_touched(block)
            of_experts = touched * block.expert_parameters * w.bytes_of("experts")
            read = (self._dense_bytes(block) / self.tp_degree + of_experts) / hbm
            if here := self.experts_here(block):
                fetches += n * of_experts * (1 - self._held(block) / here) / away
            rows = self.routed_batch * block.rows_per_token / max(self.route_degree, 1)
            weights += n * read
            products += n * max(0.0, self._products_s(block, tokens, rows) - read)
            seen = min(self._seen, block.window or self._seen)
            cache += n * tokens * seen * self._cache_of_layer(block) / hbm
            tensor += n * self._tensor_s(tokens)
            if block.num_experts:
                exchange += n * self._exchange_s(block, tokens)
        if self.overlaps:
            exchange = max(0.0, exchange - weights - cache - products)
        output = sizes.vocab_size * sizes.dim * w.bytes_of("embedding") / self.tp_degree
        return TokenSeconds(
            weights_s=weights + output / hbm,
            fetches_s=fetches,
            cache_s=cache,
            products_s=products,
            exchange_s=exchange,
            tensor_s=tensor,
            host_s=sizes.num_layers * self.layer_s,
            sequences_s=self.overheads.sequence_s * tokens,
        )

    def _products_s(self, block: LayerSizes, tokens: float, rows: float) -> float:
        """Seconds of a layer's products with weights, of tokens of a tensor-parallel group and rows of a device's
        experts."""
        e, w = Efficiency(), self.weights
        attention = tokens * block.attention_elements / self.tp_degree / self._peak(w.attention)
        rest = block.dense_parameters - block.attention_elements
        dense = tokens * rest / self.tp_degree / self._peak(w.dense)
        experts = rows * block.expert_parameters / self._peak(w.experts)
        return 2 * ((attention + dense) / e.dense + experts / e.grouped)

    def _peak(self, name: FormatName) -> float:
        precision = FORMATS[name].precision
        share = FP8_SHARE if precision == "float8" else 1.0
        return share * self.cluster.device.reached_per_s(precision)

    def _tensor_s(self, tokens: float) -> float:
        if self.tp_degree == 1:
            return 0.0
        moved = 2 * tokens * self.sizes.dim * 2 / self.cluster.inside.bytes_per_s
        return 2 * (REDUCE_S + moved)

    def _exchange_s(self, block: LayerSizes, tokens: float) -> float:
        if self.route_degree <= self.tp_degree:
            return 0.0
        held = self.experts_held(block)
        slices = RankLayout.slices(held, self.route_degree)
        route = route_of(self.route_degree, slices, self.cluster.node_size)
        load = TokenLoad.even(tokens / self.tp_degree, max(1, round(block.rows_per_token)), held)
        # Messages of one all-to-all overlap: only their bytes add up.
        inside, across = network_of(self.cluster).inside, network_of(self.cluster).across
        network = Network(replace(inside, latency_s=0.0), replace(across, latency_s=0.0))
        is_fp8 = FORMATS[self.weights.experts].precision == "float8"
        time = travel_time(
            "flat",
            route,
            replace(load, merges=False),
            network,
            dim=self.sizes.dim,
            element_bytes=2,
            out_bytes=self.sizes.dim if is_fp8 else None,
        )
        return time.total_s + 2 * EXCHANGE_S

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of a prompt on its tensor-parallel group, while every other group has one."""
        tokens, hbm = float(self.prompt), self.cluster.device.read_bytes_per_s
        wide = ATTENTION * self.cluster.device.reached_per_s("bfloat16")
        found = self.sizes.num_layers * self.overheads.eager_s if tokens else 0.0
        for block in self.sizes.blocks:
            rows = tokens * block.rows_per_token / self.tp_degree
            experts = self.experts_here(block) * block.expert_parameters
            read = self._dense_bytes(block) / self.tp_degree
            read += experts * self.weights.bytes_of("experts")
            scores = 2 * tokens * block.score_width * block.keys_seen(max(self.prompt, 1))
            each = max(self._products_s(block, tokens, rows), read / hbm if tokens else 0.0)
            each += scores / self.tp_degree / wide + (self._tensor_s(tokens) if tokens else 0.0)
            if block.num_experts and tokens:
                each += self._exchange_s(block, tokens)
            found += block.count * each
        return found

    @property
    def first_token_s(self) -> float:
        """Seconds from a prompt that need not wait to the first token of its answer."""
        return self.prefill_s + self.seconds.total_s

    @property
    def token_s(self) -> float:
        """Seconds per token of a sequence, with the prompts that come in between."""
        return self.seconds.total_s + self.local_batch / self.answer * self.prefill_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of all sequences."""
        return self.batch / self.token_s

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second of all devices."""
        return self.tokens_per_s / self.answer

    @property
    def usd_per_million(self) -> tuple[float, ...]:
        """Lowest and highest price of a million generated tokens; empty: the device has no price."""
        return self._usd(self.seconds.total_s / self.batch)

    @property
    def usd_per_million_of_prompts(self) -> tuple[float, ...]:
        """Lowest and highest price of a million tokens of prompts; empty: the device has no price, or there are no
        prompts."""
        groups = self.cluster.num_gpus / self.tp_degree
        return self._usd(self.prefill_s / groups / self.prompt) if self.prompt else ()

    def _usd(self, seconds: float) -> tuple[float, ...]:
        number = self.cluster.num_gpus
        return tuple(price * number / 3600 * seconds * 1e6 for price in self.cluster.device.usd_per_hour)


def with_most_sequences(serving: Serving, token_s: float) -> Serving | None:
    """The layout with as many sequences at once as take at most `token_s` per token; None: not even one for each
    device."""
    step = max(serving.cluster.num_gpus // serving.tp_degree, 1)

    def with_(groups: int) -> Serving | None:
        tried = replace(serving, batch=groups * step)
        return tried if tried.fits and tried.token_s <= token_s else None

    if with_(1) is None:
        return None
    low, high = 1, 2
    while with_(high) is not None and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if with_(middle) is not None else (low, middle)
    return with_(low)
