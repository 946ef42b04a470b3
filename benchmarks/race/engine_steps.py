"""Steps of the engine on one GPU: captured, launched one by one, and vLLM's where it is installed, on the same
weights."""

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import Contender, ours, sample, write_model
from benchmarks.race.parts import Keep

LOADS = ("decode 1", "decode 8", "decode 32", "decode 128", "prefill", "mixed")
_MOST = 128
"""Sequences of a step."""
_PROMPTS = [[7, 9, 11, 13 + i] * (1 + 5 * i) for i in range(6)]
_NEW = 24
_TINY = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}


def _vllm(path: str) -> Contender:
    """vLLM's engine, stepped in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import time

    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    model = LLM(model=path, dtype="bfloat16", max_model_len=2048, max_num_seqs=_MOST, gpu_memory_utilization=0.3)
    engine, counted = model.llm_engine, iter(range(1 << 30))

    def run(prompts: list[list[int]], new: list[int]) -> tuple[list[list[int]], list[float]]:
        began = time.perf_counter()
        names = [str(next(counted)) for _ in prompts]
        for name, prompt, n in zip(names, prompts, new, strict=True):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        first: dict[str, float] = {}
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - began)
                found[output.request_id] = list(output.outputs[0].token_ids)
        return [found[name] for name in names], [first[name] for name in names]

    return Contender(run, lambda ids: [])


def _contenders(device: str) -> dict[str, Callable[[str], Contender]]:
    captures = None if device == "cuda" else False
    own = partial(ours, device=device, max_sequences=_MOST)
    found: dict[str, Callable[[str], Contender]] = {
        "captured": partial(own, compile=captures),
        "captured, exact": partial(own, compile=captures, deterministic=True),
        "launched": partial(own, compile=False),
        "launched, exact": partial(own, compile=False, deterministic=True),
    }
    if importlib.util.find_spec("vllm") is not None and device == "cuda":
        found["vLLM"] = _vllm
    return found


def steps(keep: Keep, *, device: str, tiny: bool, rounds: int = 3) -> dict[str, Any]:
    """Check that captured steps say what launched ones do, bit by bit in deterministic mode, and time all by turns.

    Args:
        keep: takes results so far.
        device: cuda or cpu, where nothing is captured.
        tiny: one load of a small model.
        rounds: timed rounds.

    Returns:
        {"checks": [...], "rows": [...]}: rows with the tokens per second of a load by contender.
    """
    loads = LOADS[:1] if tiny else LOADS
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), **(_TINY if tiny else {}))
        open_ = {name: make(folder) for name, make in _contenders(device).items()}
        said = {name: one.run(_PROMPTS, [_NEW] * len(_PROMPTS))[0] for name, one in open_.items()}
        scored = {n: open_[n].scores(_PROMPTS[5]) for n in ("captured, exact", "launched, exact")}
        checks = [
            {"check": "tokens of captured and launched steps, exact", "equal": said["captured, exact"] == said["launched, exact"]},  # noqa: E501
            {"check": "prompts' logprobs, exact", "equal": scored["captured, exact"] == scored["launched, exact"]},
        ]  # fmt: skip
        result: dict[str, Any] = {"checks": checks, "rows": []}
        keep(result)
        for load in loads:
            rates: dict[str, list[float]] = {name: [] for name in open_}
            for seed in range(rounds):
                for name, one in open_.items():
                    rates[name].append(sample(one, load, seed).rate)
            row: dict[str, Any] = {"load": load}
            middle = {name: statistics.median(r) for name, r in rates.items()}
            row |= {f"{name}, tokens/s": round(rate) for name, rate in middle.items()}
            row["price of deterministic"] = middle["captured"] / middle["captured, exact"]
            result["rows"].append(row)
            keep(result)
    assert all(check["equal"] for check in checks), checks
    return result
