"""Numbers for Prometheus: names and meaning as vLLM's, with `expertmesh:` before them, and the load of every expert."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from expertmesh.engine.engine import Engine
from expertmesh.serve.request_metrics import SHORT_S, TOKENS, RequestMetrics

_LOOK_S = 0.05
_PAGING = {
    "hits": ("hits", "experts of a step that were in their slots"),
    "misses": ("misses", "experts of a step that had to be copied"),
    "bytes": ("bytes_copied", "bytes copied into slots"),
}


class Metrics:
    """What one server counts; `text` is what Prometheus reads.

    Args:
        engine: whose numbers are read when somebody asks.
        model_name: label of all of them.

    Attributes:
        requests: what is counted of each answer.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._name = engine, model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory and CPU time of this process
        self.requests = RequestMetrics(self._registry, model_name)

        def timed(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(
                f"expertmesh:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            )
            return found.labels(model_name)

        self._step = timed("iteration_duration_seconds", "of a step of the engine", SHORT_S)
        self._tokens = timed("iteration_tokens_total", "tokens of a step", TOKENS)
        self._lag = timed("event_loop_lag_seconds", "by which the event loop is late", SHORT_S)
        self._rejected = Counter(
            "expertmesh:admission_rejections",
            "requests that were not taken",
            ["model_name", "reason"],
            registry=self._registry,
        )

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step of the engine is done."""
        self._step.observe(seconds)
        self._tokens.observe(num_tokens)

    async def watch_loop(self) -> None:
        """Measure for ever by how much the event loop is late."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def rejected(self, reason: str) -> None:
        """A request was not taken."""
        self._rejected.labels(self._name, reason).inc()

    def text(self) -> tuple[str, str]:
        """All numbers, and the type of their text."""
        encode, kind = choose_encoder("")
        return encode(self._registry).decode(), kind

    def collect(self) -> Iterator[Metric]:
        """The engine's own numbers, now."""
        stats, engine = self._engine.stats(), self._engine
        used = stats.num_used_blocks / stats.num_blocks
        gauges = {
            "num_requests_running": (stats.num_running, "answers that hold blocks"),
            "num_requests_waiting": (stats.num_waiting, "answers that wait"),
            "kv_cache_usage_perc": (used, "share of the blocks that answers hold"),
        }
        counters = {
            "generation_tokens": (stats.num_generated_tokens, "tokens that were drawn"),
            "num_preemptions": (stats.num_preemptions, "answers that gave their blocks back"),
            "prefix_cache_queries": (stats.prefix_queries, "tokens looked for in the cache"),
            "prefix_cache_hits": (stats.prefix_hits, "tokens found in the cache"),
            "spec_decode_num_draft_tokens": (stats.num_draft_tokens, "tokens that were guessed"),
            "spec_decode_num_accepted_tokens": (
                stats.num_accepted_tokens,
                "guesses that were right",
            ),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(f"expertmesh:{name}", text, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, (value, text) in counters.items():
            counter = CounterMetricFamily(f"expertmesh:{name}", text, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter
        config = {
            "block_size": str(engine.config.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "enable_prefix_caching": str(engine.config.prefix_caching),
        }
        sources = CounterMetricFamily(
            "expertmesh:prompt_tokens_by_source",
            "tokens of prompts that were computed, and that the cache gave",
            labels=["model_name", "source"],
        )
        sources.add_metric([self._name, "local_compute"], stats.num_prompt_tokens)
        sources.add_metric([self._name, "local_cache_hit"], stats.prefix_hits)
        yield sources
        cache = GaugeMetricFamily(
            "expertmesh:cache_config_info", "of the cache", labels=["model_name", *config]
        )
        cache.add_metric([self._name, *config.values()], 1)
        yield cache
        load = CounterMetricFamily(
            "expertmesh:expert_tokens",
            "tokens that an expert has served",
            labels=["model_name", "layer", "expert"],
        )
        for layer, counts in enumerate(engine.expert_load()):
            for expert, count in enumerate(counts):
                load.add_metric([self._name, str(layer), str(expert)], count)
        yield load
        asked = CounterMetricFamily(
            "expertmesh:adapter_requests",
            "requests that have chosen an adapter",
            labels=["model_name", "adapter"],
        )
        for adapter, count in engine.adapter_requests().items():
            asked.add_metric([self._name, adapter], count)
        if engine.adapters:
            yield asked
        yield from self._placement()
        paging = engine.expert_paging()
        for name, (field, text) in _PAGING.items() if paging else ():
            family = CounterMetricFamily(
                f"expertmesh:expert_slot_{name}", text, labels=["model_name", "layer"]
            )
            for layer, one in enumerate(paging):
                family.add_metric([self._name, str(layer)], getattr(one, field))
            yield family

    def _placement(self) -> Iterator[Metric]:
        """How even the load of ranks was where experts lay, and is where they lie now."""
        counts = self._engine.expert_placement()
        if counts is None:
            return
        rebalances = CounterMetricFamily(
            "expertmesh:eplb_rebalances",
            "times that experts were placed by load",
            labels=["model_name"],
        )
        rebalances.add_metric([self._name], counts.num_rebalances)
        yield rebalances
        moved = CounterMetricFamily(
            "expertmesh:eplb_moved_experts",
            "experts that came to a rank without them",
            labels=["model_name"],
        )
        moved.add_metric([self._name], counts.num_moved)
        yield moved
        balance = GaugeMetricFamily(
            "expertmesh:eplb_balance",
            "mean load of a rank by the largest, of the last interval",
            labels=["model_name", "layer", "when"],
        )
        for when, values in (("before", counts.before), ("after", counts.after)):
            for layer, value in enumerate(values):
                balance.add_metric([self._name, str(layer), when], value)
        yield balance
