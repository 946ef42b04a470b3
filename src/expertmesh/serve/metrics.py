"""Prometheus metrics: vLLM's names with the prefix `expertmesh:`, and the load of every expert."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from expertmesh.engine.engine import Engine
from expertmesh.ops.backend import cpu_kernels
from expertmesh.serve.request_metrics import SHORT_S, TOKENS, RequestMetrics

_LOOK_S = 0.05
_PAGING = {
    "hits": ("hits", "experts of a step that were in their slots"),
    "misses": ("misses", "experts of a step that had to be copied"),
    "bytes": ("bytes_copied", "bytes copied into slots"),
}


class Metrics:
    """Metrics of a server, read by Prometheus as `text`."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._name = engine, model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory and CPU time of this process
        self.requests = RequestMetrics(self._registry, model_name)  # metrics per answer

        def timed(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(f"expertmesh:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
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
        """Record a step of the engine."""
        self._step.observe(seconds)
        self._tokens.observe(num_tokens)

    async def watch_loop(self) -> None:
        """Measure the lag of the event loop, forever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def rejected(self, reason: str) -> None:
        """Count a rejected request."""
        self._rejected.labels(self._name, reason).inc()

    def text(self) -> tuple[str, str]:
        """All metrics as text, and its content type."""
        encode, kind = choose_encoder("")
        return encode(self._registry).decode(), kind

    def collect(self) -> Iterator[Metric]:
        """Current statistics of the engine."""
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
            yield self._family(GaugeMetricFamily, name, text, [(value,)])
        for name, (value, text) in counters.items():
            yield self._family(CounterMetricFamily, name, text, [(value,)])
        yield self._family(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "tokens of prompts that were computed, and that the cache gave",
            [
                ("local_compute", stats.num_prompt_tokens),
                ("local_cache_hit", stats.num_cached_prompt_tokens),
            ],
            labels=["source"],
        )
        config = {
            "block_size": engine.config.block_size,
            "num_gpu_blocks": stats.num_blocks,
            "enable_prefix_caching": engine.config.prefix_caching,
        }
        yield self._family(
            GaugeMetricFamily,
            "cache_config_info",
            "of the cache",
            [(*config.values(), 1)],
            labels=list(config),
        )
        if engine.model.device.type == "cpu":
            yield self._family(
                GaugeMetricFamily,
                "cpu_kernels_info",
                "of the kernels for CPUs, on which the bits of answers depend",
                [(cpu_kernels(), 1)],
                labels=["kernels"],
            )
        yield self._family(
            CounterMetricFamily,
            "expert_tokens",
            "tokens that an expert has served",
            [
                (layer, expert, count)
                for layer, counts in enumerate(engine.expert_load())
                for expert, count in enumerate(counts)
            ],
            labels=["layer", "expert"],
        )
        if engine.adapters:
            yield self._family(
                CounterMetricFamily,
                "adapter_requests",
                "requests that have chosen an adapter",
                engine.adapter_requests().items(),
                labels=["adapter"],
            )
        yield from self._placement()
        paging = engine.expert_paging()
        for name, (field, text) in _PAGING.items() if paging else ():
            rows = [(layer, getattr(one, field)) for layer, one in enumerate(paging)]
            yield self._family(CounterMetricFamily, f"expert_slot_{name}", text, rows, labels=["layer"])

    def _placement(self) -> Iterator[Metric]:
        """Balance of the ranks' load before and after the last rebalancing of experts, and its counters."""
        counts = self._engine.expert_placement()
        if counts is None:
            return
        for name, text, value in (
            ("rebalances", "times that experts were placed by load", counts.num_rebalances),
            ("moved_experts", "experts that came to a rank without them", counts.num_moved),
        ):
            yield self._family(CounterMetricFamily, f"eplb_{name}", text, [(value,)])
        yield self._family(
            GaugeMetricFamily,
            "eplb_balance",
            "mean load of a rank by the largest, of the last interval",
            [
                (layer, when, value)
                for when, values in (("before", counts.before), ("after", counts.after))
                for layer, value in enumerate(values)
            ],
            labels=["layer", "when"],
        )

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        rows: Iterable[tuple[Any, ...]],
        *,
        labels: Sequence[str] = (),
    ) -> Metric:
        """Metric family of a name; each row has the label values after the model's name, then the number."""
        found = kind(f"expertmesh:{name}", text, labels=["model_name", *labels])
        for *values, number in rows:
            found.add_metric([self._name, *map(str, values)], number)
        return found
