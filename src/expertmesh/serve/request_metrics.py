"""Prometheus metrics per answer: latencies, and numbers of tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from expertmesh.engine.output import RequestOutput
from expertmesh.serve.worker import Ticket

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FEW = (1, 2, 3, 4, 5, 10, 20)

_TIMED = {
    "time_to_first_token_seconds": ("from the request to its first token", _LONG_S),
    "inter_token_latency_seconds": ("between two tokens", SHORT_S),
    "request_time_per_output_token_seconds": ("of an answer, per token behind the first", SHORT_S),
    "e2e_request_latency_seconds": ("from the request to the last token of an answer", _LONG_S),
    "request_queue_time_seconds": ("an answer waits until it is admitted", _LONG_S),
    "request_prefill_time_seconds": ("from admission to the first token", _LONG_S),
    "request_decode_time_seconds": ("from the first token to the last", _LONG_S),
    "request_inference_time_seconds": ("from admission to the last token", _LONG_S),
    "request_prompt_tokens": ("tokens of a prompt", TOKENS),
    "request_prefill_kv_computed_tokens": ("tokens of a prompt that no prefix gave", TOKENS),
    "request_generation_tokens": ("tokens of an answer", TOKENS),
    "request_max_num_generation_tokens": ("tokens of the longest answer of a request", TOKENS),
    "request_num_preemptions": ("an answer gave its blocks back", _FEW),
    "request_params_n": ("answers asked for", _FEW),
    "request_params_max_tokens": ("most tokens asked for", TOKENS),
}
"""Histograms by name: help text and bucket bounds."""


@dataclass
class _Seen:
    """State of an answer at its last update: number of tokens, time, and whether it has ended."""

    num_tokens: int
    at: float
    has_ended: bool = False


class RequestMetrics:
    """Histograms over answers, as in vLLM: a request with n = 2 counts as two."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._name = model_name
        self._of = {
            name: Histogram(f"expertmesh:{name}", text, ["model_name"], buckets=buckets, registry=registry).labels(
                model_name
            )
            for name, (text, buckets) in _TIMED.items()
        }
        self._success = Counter(
            "expertmesh:request_success",
            "answers that have ended",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._prompt = Counter(
            "expertmesh:prompt_tokens", "tokens of prompts", ["model_name"], registry=registry
        ).labels(model_name)

    def watch(self, ticket: Ticket) -> Callable[[dict[int, RequestOutput]], None]:
        """Callback for all updates of a ticket's answers; timing starts now."""
        begin = time.perf_counter()
        seen: dict[int, _Seen] = {}

        def update(news: dict[int, RequestOutput]) -> None:
            now = time.perf_counter()
            for index, output in news.items():
                self._token(output, seen.get(index), begin, now)
                has_ended = output.finish_reason is not None
                if has_ended:
                    self._ended(output, now - begin)
                seen[index] = _Seen(len(output.token_ids), now, has_ended)
            if len(seen) == ticket.num_answers and all(one.has_ended for one in seen.values()):
                self._request_ended(ticket, seen)

        return update

    def left(self, count: int) -> None:
        """Count answers whose client has gone, or that a stop ended; thread-safe."""
        if count:
            self._success.labels(self._name, "abort").inc(count)

    def _token(self, output: RequestOutput, before: _Seen | None, begin: float, now: float) -> None:
        if before is None:
            self._prompt.inc(len(output.prompt_ids))
            if output.token_ids:  # an answer may end by an error at its first token
                self._of["time_to_first_token_seconds"].observe(now - begin)
            if (timing := output.timing) is not None and timing.admitted is not None:
                self._of["request_queue_time_seconds"].observe(timing.admitted - timing.added)
        elif new := len(output.token_ids) - before.num_tokens:
            self._of["inter_token_latency_seconds"].observe((now - before.at) / new)

    def _ended(self, output: RequestOutput, seconds: float) -> None:
        """Record a finished answer."""
        assert output.finish_reason is not None
        self._success.labels(self._name, output.finish_reason).inc()
        prompt, new = len(output.prompt_ids), len(output.token_ids)
        values = {
            "e2e_request_latency_seconds": seconds,
            "request_prompt_tokens": prompt,
            "request_prefill_kv_computed_tokens": prompt - output.num_cached_tokens,
            "request_generation_tokens": new,
        }
        timing = output.timing
        if timing is not None and timing.admitted is not None and timing.last_token is not None:
            first = timing.first_token or timing.last_token
            decode = timing.last_token - first
            values |= {
                "request_prefill_time_seconds": first - timing.admitted,
                "request_decode_time_seconds": decode,
                "request_inference_time_seconds": timing.last_token - timing.admitted,
                "request_time_per_output_token_seconds": decode / (new - 1) if new > 1 else 0.0,
                "request_num_preemptions": timing.num_preemptions,
            }
        for name, value in values.items():
            self._of[name].observe(value)

    def _request_ended(self, ticket: Ticket, seen: dict[int, _Seen]) -> None:
        """Record the request parameters per prompt, when all answers have ended."""
        first = 0
        for params in ticket.params:
            longest = max(seen[first + i].num_tokens for i in range(params.n))
            self._of["request_max_num_generation_tokens"].observe(longest)
            self._of["request_params_n"].observe(params.n)
            if params.max_tokens is not None:
                self._of["request_params_max_tokens"].observe(params.max_tokens)
            first += params.n
