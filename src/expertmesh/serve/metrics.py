"""Numbers for Prometheus: names and meaning as vLLM's, with `expertmesh:` before them, and the load of every expert."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from expertmesh.engine.engine import Engine
from expertmesh.engine.output import RequestOutput
from expertmesh.serve.worker import Ticket

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_LOOK_S = 0.05
_PAGING = {
    "hits": ("hits", "experts of a step that were in their slots"),
    "misses": ("misses", "experts of a step that had to be copied"),
    "bytes": ("bytes_copied", "bytes copied into slots"),
}
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Metrics:
    """What one server counts; `text` is what Prometheus reads.

    Args:
        engine: whose numbers are read when somebody asks.
        model_name: label of all of them.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._name = engine, model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def timed(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            found = Histogram(
                f"expertmesh:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            )
            return found.labels(model_name)

        self._first = timed("time_to_first_token_seconds", "until the first token", _LONG)
        self._between = timed("inter_token_latency_seconds", "between two tokens", _SHORT)
        self._whole = timed("e2e_request_latency_seconds", "until the last token", _LONG)
        self._step = timed("iteration_duration_seconds", "of a step of the engine", _SHORT)
        self._tokens = timed("iteration_tokens_total", "tokens drawn in a step", _TOKENS)
        self._lag = timed("event_loop_lag_seconds", "by which the event loop is late", _SHORT)
        self._success = Counter(
            "expertmesh:request_success",
            "answers that have ended",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
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

    def watch(self, ticket: Ticket) -> Callable[[dict[int, RequestOutput]], None]:
        """What is told of each newer state of a ticket's answers, from now on."""
        begin = time.perf_counter()
        seen: dict[int, tuple[int, float]] = {}

        def told(news: dict[int, RequestOutput]) -> None:
            now = time.perf_counter()
            for index, output in news.items():
                count, last = seen.get(index, (0, begin))
                new = len(output.token_ids) - count
                if count == 0:
                    self._first.observe(now - begin)
                elif new:
                    self._between.observe((now - last) / new)
                seen[index] = len(output.token_ids), now
                if output.finish_reason is not None:
                    self._success.labels(self._name, output.finish_reason).inc()
            if len(seen) == ticket.num_answers and all(
                output.finish_reason is not None for output in news.values()
            ):
                self._whole.observe(now - begin)

        return told

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
            "prompt_tokens": (stats.num_prompt_tokens, "tokens of prompts that were computed"),
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
        load = CounterMetricFamily(
            "expertmesh:expert_tokens",
            "tokens that an expert has served",
            labels=["model_name", "layer", "expert"],
        )
        for layer, counts in enumerate(engine.expert_load()):
            for expert, count in enumerate(counts):
                load.add_metric([self._name, str(layer), str(expert)], count)
        yield load
        paging = engine.expert_paging()
        for name, (field, text) in _PAGING.items() if paging else ():
            family = CounterMetricFamily(
                f"expertmesh:expert_slot_{name}", text, labels=["model_name", "layer"]
            )
            for layer, one in enumerate(paging):
                family.add_metric([self._name, str(layer)], getattr(one, field))
            yield family
