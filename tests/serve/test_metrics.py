"""What /metrics says is what the engine counts, and what answers had."""

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.ops.backend import cpu_kernels
from expertmesh.serve.metrics import Metrics
from expertmesh.serve.request_metrics import RequestMetrics
from expertmesh.serve.worker import EngineWorker, Ticket

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.mark.parametrize("slots", [None, 2])
def test_guesses_and_slots_are_counted(folder, slots):
    engine = Engine(folder, expert_slots=slots, num_draft_tokens=2)
    engine.generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=12))
    text, _ = Metrics(engine, "tiny").text()

    def values(name):
        return [float(one) for one in re.findall(rf"^expertmesh:{name}_total.* (\S+)$", text, re.M)]

    stats, paging = engine.stats(), engine.expert_paging()
    assert values("spec_decode_num_draft_tokens") == [stats.num_draft_tokens]
    assert values("spec_decode_num_accepted_tokens") == [stats.num_accepted_tokens]
    assert stats.num_draft_tokens > 0
    assert bool(paging) == (slots is not None)
    assert values("expert_slot_hits") == [one.hits for one in paging]
    assert values("expert_slot_misses") == [one.misses for one in paging]
    assert values("expert_slot_bytes") == [one.bytes_copied for one in paging]
    assert all(one.misses for one in paging)


def test_each_answer_counts_once_with_its_times_and_tokens(folder):
    engine = Engine(folder, max_sequences=2, block_size=4)
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "tiny")
    asked = [([1, 2, 3] * 3, 5, 1), ([1, 2, 3] * 3, 2, 3), ([4, 5], 7, 1)]
    of, ended = {}, []
    for prompt, most, n in asked:
        params = SamplingParams(max_tokens=most, n=n, seed=0, ignore_eos=True)
        of[engine.add(prompt, params)] = metrics.watch(Ticket([prompt], [params]))
    while engine.has_work:
        for output in engine.step():
            of[output.request_id]({output.index: output})
            ended += [output] if output.finish_reason else []

    def value(name, **labels):
        return registry.get_sample_value(f"expertmesh:{name}", {"model_name": "tiny"} | labels)

    for name, of_answer in {
        "request_queue_time_seconds": lambda o: o.timing.admitted - o.timing.added,
        "request_prefill_time_seconds": lambda o: o.timing.first_token - o.timing.admitted,
        "request_decode_time_seconds": lambda o: o.timing.last_token - o.timing.first_token,
        "request_inference_time_seconds": lambda o: o.timing.last_token - o.timing.admitted,
        "request_prompt_tokens": lambda o: len(o.prompt_ids),
        "request_generation_tokens": lambda o: len(o.token_ids),
        "request_prefill_kv_computed_tokens": lambda o: len(o.prompt_ids) - o.num_cached_tokens,
    }.items():
        assert value(f"{name}_count") == len(ended) == 5
        assert value(f"{name}_sum") == pytest.approx(sum(map(of_answer, ended)), rel=1e-9)
    assert value("time_to_first_token_seconds_count") == 5
    assert value("e2e_request_latency_seconds_count") == 5
    assert value("inter_token_latency_seconds_count") == 4 + 3 * 1 + 6
    assert value("request_max_num_generation_tokens_count") == 3
    assert value("request_max_num_generation_tokens_sum") == 5 + 2 + 7
    assert value("request_params_n_sum") == 5
    assert value("request_params_max_tokens_sum") == 5 + 2 + 7
    assert value("request_success_total", finished_reason="length") == 5
    assert value("prompt_tokens_total") == 9 + 3 * 9 + 2


@pytest.mark.parametrize(("answers", "most", "aborted"), [(1, 400, 1), (3, 400, 3), (1, 2, 0)])
def test_answers_that_a_client_left_are_aborted_ones(folder, answers, most, aborted):
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "tiny")

    async def leave():
        worker = EngineWorker(Engine(folder), left=metrics.left)
        worker.start(asyncio.get_running_loop())
        params = SamplingParams(max_tokens=most, n=answers, ignore_eos=True)
        ticket = Ticket([[1, 2, 3]], [params])
        watch = metrics.watch(ticket)
        worker.submit(ticket)
        async for news in ticket.changes():
            watch(news)
            if aborted:
                break
        worker.close(ticket)
        await asyncio.to_thread(worker.stop)

    asyncio.run(leave())
    of = {
        reason: registry.get_sample_value(
            "expertmesh:request_success_total", {"model_name": "tiny", "finished_reason": reason}
        )
        for reason in ("abort", "length")
    }
    assert of == {"abort": aborted or None, "length": (answers - aborted) or None}


def test_the_kernels_on_which_bits_depend_are_named(folder):
    text, _ = Metrics(Engine(folder), "tiny").text()
    assert f'expertmesh:cpu_kernels_info{{kernels="{cpu_kernels()}",model_name="tiny"}} 1.0' in text


def test_tokens_of_prompts_are_computed_or_found(folder):
    engine = Engine(folder, block_size=4)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    outputs = [engine.generate([1, 2, 3] * 3, params)[0] for _ in range(2)]
    text, _ = Metrics(engine, "tiny").text()
    found = re.findall(r'^expertmesh:prompt_tokens_by_source_total.*source="(.*)"} (\S+)$', text, re.M)
    cached = outputs[1].num_cached_tokens
    assert cached == 8
    assert dict(found) == {"local_compute": f"{18 - cached}.0", "local_cache_hit": f"{cached}.0"}


def test_the_page_of_documentation_names_what_is_there(server):
    section = DOCS.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert "--expert-slots" in "".join(rows)
    named = {
        name.partition("{")[0]
        for row in rows
        if "with `--" not in row  # of options that this server has not
        for name in re.findall(r"`([a-z0-9_]+(?:\{[a-z_,]+\})?)`", row)
    }
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    there = set(re.findall(r"^# TYPE (?:expertmesh:)?(\S+) (?:gauge|counter|histogram)", text, re.M))
    there = {name for name in there if not name.endswith("_created")}
    assert named == there
