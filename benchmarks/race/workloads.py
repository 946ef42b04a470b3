"""What users run, on one GPU: fine-tuning with adapters beside transformers and peft, exact reinforcement learning,
paged experts, and the memory of each beside what the planner says."""

import hashlib
import importlib.util
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.engine import VOCAB, ours, write_model
from benchmarks.finetune_peers import work
from benchmarks.finetune_peers.work import ALPHA, RANK
from benchmarks.race.formats import assert_all, tried
from benchmarks.race.layers import release
from benchmarks.race.parts import Keep
from benchmarks.race.train import ours as trainers_own_step
from benchmarks.race.train import timed_steps
from torch import nn

from expertmesh.costs.memory import GIB
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.costs import gpt_costs

FOLDER = Path("runs/race_workloads")
"""Models, which the parts share, and runs, which do not outlast their part."""
_TINY = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}
_TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
_QWEN3 = {"num_hidden_layers": 4, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
_QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8}
_POLICY = {"num_hidden_layers": 2, "moe_intermediate_size": 256}
_ROWS = 4
_SAME_LOSS = 0.005
"""First losses of the same weights differ by less, in nats: BF16 rounds them differently."""
_ADAPTERS = f"--adapter.kind lora --adapter.rank {RANK} --adapter.expert-rank {RANK} --adapter.alpha {ALPHA}"
_ADAPTERS += " --adapter.targets attention experts"
Row = dict[str, Any]


def model_of(sizes: dict[str, int], device: str) -> Path:
    """Folder of a random model of these sizes; it is written on the device, once for all parts."""
    name = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:12]
    folder = FOLDER.absolute() / name
    if not folder.exists():
        began, new = time.monotonic(), folder.with_name(f"{name}.new")
        shutil.rmtree(new, ignore_errors=True)  # of a part that was killed
        new.mkdir(parents=True)
        write_model(new, device=device, **sizes)
        work.write_tokenizer(new)
        new.rename(folder)
        print(f"{folder}: {time.monotonic() - began:.0f} s", flush=True)
        release(device)
    return folder


@contextmanager
def _parsed(model: Path, words: str, *, device: str, length: int, steps: int) -> Iterator[Any]:
    """The run that `expertmesh train` would begin with these words, on random texts, in a folder that is removed."""
    from expertmesh.cli.start_training import parse_and_begin, ready_to_train

    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        lines = [json.dumps(one) for one in work.records("sft", 64, length)]
        (Path(folder) / "rows.jsonl").write_text("\n".join(lines))
        (Path(folder) / "rewards.py").write_text(work.REWARDS)
        common = f"""{model} --data.path {folder}/rows.jsonl --data.completions text --data.seq-len {length}
            --data.cache-dir {folder}/cache --train.run-dir {folder}/run --train.steps {steps} --train.device {device}
            --train.no-activation-checkpointing --train.eval-every {steps} --train.eval-batches 1
            --train.checkpoint-every {steps} --train.no-tensorboard"""
        if "grpo" in words:
            common += f" --reward.functions {folder}/rewards.py:early"
        found = parse_and_begin([*common.split(), *words.split()])
        with ready_to_train(found.config):
            yield found


class _Steps:
    """A tracker of a training: seconds between its steps, what it measured, and the peak of memory after the first."""

    def __init__(self, device: str) -> None:
        self.peak, self.times, self.values = _Peak(device), list[float](), list[Row]()

    def write(self, values: Row, experts: Any) -> None:
        """Take what a step tells."""
        if not self.times:
            self.peak.begin()  # loading, and buffers of the first step, are not the step's
        self.times.append(time.perf_counter())
        self.values.append(dict(values))

    @property
    def seconds(self) -> float:
        """Median of the steps behind the second; the last one, which evaluates, left out."""
        pairs = list(zip(self.times, self.times[1:], strict=False))
        return statistics.median(after - before for before, after in pairs[1:-1])


class _Peak:
    """The most bytes of tensors on a GPU; None elsewhere."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        self.before = torch.cuda.memory_allocated() if self.is_cuda else 0

    def begin(self) -> None:
        """Forget the peak so far."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int | None:
        """The peak, without what was there before."""
        return torch.cuda.max_memory_allocated() - self.before if self.is_cuda else None

    @property
    def now(self) -> int | None:
        """What is allocated now, without what was there before."""
        return torch.cuda.memory_allocated() - self.before if self.is_cuda else None


def _memory(what: str, measured: int | None, predicted: float) -> Row:
    row: Row = {"what": what, "measured GiB": "", "predicted GiB": predicted / GIB, "ratio": ""}
    return row if measured is None else row | {"measured GiB": measured / GIB, "ratio": measured / predicted}


def _predicted(config: GPTRunConfig) -> float:
    return gpt_costs(config, num_ranks=1, dtype="bfloat16", on_gpu=True).memory.live_bytes


def lora(keep: Keep, *, device: str, tiny: bool = False) -> dict[str, list[Row]]:
    """A part: a step of SFT with adapters on attention and experts, by `expertmesh train` on bases of three formats,
    and by a plain loop over transformers and peft.

    Returns:
        {"rows": a row per contender, "memory": peaks beside the planner's}.

    Raises:
        AssertionError: a row failed, or first losses differ.
    """
    model, length = model_of(_TINY if tiny else _QWEN3, device), 128 if tiny else 2048
    result: dict[str, list[Row]] = {"rows": [], "memory": []}
    steps = 4 if tiny else 8
    how = {"device": device, "length": length, "steps": steps}

    def mine(storage: str) -> Row:
        words = f"--base.storage {storage} --train.dtype bfloat16 --train.batch-size {_ROWS} {_ADAPTERS}"
        with _parsed(model, words, **how) as parsed:
            from expertmesh.training.loop import train

            seen = _Steps(device)
            train(parsed.config, family=parsed.family, trackers=[seen])
            result["memory"].append(_memory(f"LoRA step, {storage}", seen.peak.bytes, _predicted(parsed.config)))
        return _of_steps(seen.seconds, [one["loss"] for one in seen.values], seen.peak.bytes, _ROWS * length)

    def peers() -> Row:
        missing = [name for name in ("transformers", "accelerate", "peft") if importlib.util.find_spec(name) is None]
        if missing:
            return {"left out": f"{missing[0]} is not installed"}
        words = f"--train.dtype bfloat16 --train.batch-size {_ROWS} {_ADAPTERS}"
        with _parsed(model, words, **how) as parsed:
            data = parsed.family.open_task(parsed.config).prepare()
            batches = [data.batch(number * _ROWS, _ROWS) for number in range(steps)]
        peak = _Peak(device)
        step = _peft(model, device, parsed.config.optim, peak)
        seconds, losses = timed_steps(step, batches, 2)
        return _of_steps(seconds, losses, peak.bytes, _ROWS * length)

    for name, run in (
        ("expertmesh", partial(mine, "bfloat16")),
        ("transformers + peft, grouped_mm", peers),
        ("expertmesh, base in int4", partial(mine, "int4")),
        ("expertmesh, base in nf4", partial(mine, "nf4")),
    ):
        result["rows"].append({"trainee": name} | tried(run))
        keep(result)
        release(device)
    words = [row.get("loss, first to last") for row in result["rows"][:2]]
    first = [float(said.split()[0]) for said in words if said]
    if len(first) == 2 and not abs(first[0] - first[1]) < _SAME_LOSS:
        result["rows"][1]["failed"] = f"its first loss is not ours, {first[0]:.4f}, of the same weights"
    keep(result)
    assert_all(result["rows"])
    return result


def _of_steps(seconds: float, losses: list[float], peak: int | None, num_tokens: int) -> Row:
    return {
        "ms per step": seconds * 1e3,
        "tokens/s": round(num_tokens / seconds),
        "peak GiB": "" if peak is None else peak / GIB,
        "loss, first to last": f"{losses[0]:.4f} - {losses[-1]:.4f}",
    }


def _peft(model: Path, device: str, optim: Any, peak: _Peak) -> Any:
    """A step of the plain loop: autocast, the same rows and mean, clipping, AdamW (fused)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    names = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    names["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(base.to(device), LoraConfig(r=RANK, lora_alpha=ALPHA, **names)).train()
    learn = [one for one in adapted.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learn, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
    count = 0

    def step(batch: Any) -> float:
        nonlocal count
        ids_BS, targets_BS, more = batch
        ids_BS, targets_BS, counts_BS = (t.to(device) for t in (ids_BS, targets_BS, more["counts"]))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits_BSV = adapted(input_ids=ids_BS, use_cache=False).logits
        counts_N = counts_BS.flatten().float()
        losses_N = F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="none")
        loss = (losses_N * counts_N).sum() / counts_N.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(learn, optim.grad_clip)
        optimizer.step()
        found = loss.item()
        count += 1
        if count == 1:
            peak.begin()
        return found

    return step


def full(keep: Keep, *, device: str, tiny: bool = False) -> dict[str, list[Row]]:
    """A part: peak memory of a step of all weights of the same sizes, with FP32 masters, beside the planner's."""
    model, length = model_of(_TINY if tiny else _QWEN3, device), 128 if tiny else 2048
    words = f"--train.dtype bfloat16 --train.batch-size {_ROWS}"
    with _parsed(model, words, device=device, length=length, steps=3) as parsed:
        config = parsed.config
        data = parsed.family.open_task(config).prepare()
        batches = [data.batch(number * _ROWS, _ROWS) for number in range(3)]
        peak, step = _Peak(device), trainers_own_step(config, compiled=False)
        losses = [step(batches[0])]
        peak.begin()
        seconds, more = timed_steps(step, batches[1:], 0)
    row = {"trainee": "expertmesh, all weights"}
    row |= _of_steps(seconds, losses + more, peak.bytes, _ROWS * length)
    return {"rows": [row], "memory": [_memory("step of all weights", peak.bytes, _predicted(config))]}


_ARMS = {
    "all weights": "--optim.lr 1e-4",
    "LoRA": _ADAPTERS,
    "LoRA on int4": f"{_ADAPTERS} --base.storage int4",
    "LoRA on nf4": f"{_ADAPTERS} --base.storage nf4",
}


def exact_rl(keep: Keep, *, device: str, dtype: str, tiny: bool = False) -> list[Row]:
    """A part: a few updates of GRPO; the log-probability of every token in training is that of its rollout, to the bit.

    Raises:
        AssertionError: in an arm it is not.
    """
    model, updates = model_of(_TINY if tiny else _POLICY, device), 2 if tiny else 4
    sizes = "--rl.group 2 --rl.max-tokens 4 --train.batch-size 2"
    if not tiny:
        sizes = "--rl.group 8 --rl.max-tokens 64 --train.batch-size 8"
    rows: list[Row] = []

    def arm(words: str) -> Row:
        given = f"--objective.name grpo --train.dtype {dtype} --data.validation-fraction 0.1 {sizes} {words}"
        with _parsed(model, given, device=device, length=128, steps=updates) as parsed:
            from expertmesh.training.loop import train

            seen, began = _Steps(device), time.perf_counter()
            train(parsed.config, family=parsed.family, trackers=[seen])
        worst = max(one["mismatch_max"] for one in seen.values)
        row = {"updates": len(seen.values), "largest |train - rollout|": worst, "s": time.perf_counter() - began}
        return row if worst == 0.0 else row | {"failed": f"logprobs differ by {worst}: not exact"}

    for name, words in _ARMS.items():
        rows.append({"what learns": name, "dtype": dtype} | tried(partial(arm, words)))
        keep(rows)
        release(device)
    assert_all(rows)
    return rows


def paged(keep: Keep, *, device: str, tiny: bool = False) -> dict[str, list[Row]]:
    """A part: decoding with a quarter and half of the experts on the GPU, beside all of them; equal answers in
    deterministic mode.

    Returns:
        {"rows": a row per number of slots and batch, "checks": equal answers, "memory": of the engine}.

    Raises:
        AssertionError: a row failed, or answers differ.
    """
    sizes = _TINY if tiny else _QWEN3
    model, E = model_of(sizes, device), sizes["num_experts"]
    result: dict[str, list[Row]] = {"rows": [], "checks": [], "memory": []}
    all_rates: dict[int, float] = {}
    for slots in (None, E // 2, E // 4):
        opened = tried(lambda slots=slots: {"runs": _Decoding(model, device, slots, result["memory"], sizes)})
        for batch, new in ((1, 4), (2, 4)) if tiny else ((1, 64), (8, 16)):
            row: Row = {"slots": slots or "all", "batch": batch}
            row |= tried(partial(opened["runs"], batch, new)) if "runs" in opened else opened
            if slots is None and "tokens/s" in row:
                all_rates[batch] = row["tokens/s"]
            if all_rates.get(batch) and "tokens/s" in row:
                row["of all experts"] = row["tokens/s"] / all_rates[batch]
            result["rows"].append(row)
            keep(result)
        del opened
        release(device)
    prompts = _prompts(2 if tiny else 8)
    answers = {}
    for slots in (None, E // 4):
        run = ours(str(model), device=device, deterministic=True, expert_slots=slots, max_sequences=8).run
        answers[slots] = run(prompts, [8] * len(prompts))[0]
        del run
        release(device)
    result["checks"].append({"check": "answers with slots, deterministic", "equal": answers[None] == answers[E // 4]})
    keep(result)
    assert_all(result["rows"])
    assert all(check["equal"] for check in result["checks"]), result["checks"]
    return result


def _prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(3, VOCAB) for _ in range(32)] for _ in range(count)]


class _Decoding:
    """An engine, all of whose experts are on the device or some: tokens per second, and what is copied for them."""

    def __init__(self, model: Path, device: str, slots: int | None, memory: list[Row], sizes: dict[str, int]) -> None:
        import expertmesh as em
        from expertmesh.planner.serve import serve_plan

        peak = _Peak(device)
        blocks = {"num_blocks": 256, "block_size": 32, "max_sequences": 8}
        self.engine = em.Engine(str(model), dtype="bfloat16", device=device, expert_slots=slots, **blocks)
        self.engine.warm_up()
        best = serve_plan(
            str(model), cluster="h200x1", batch=8, context=1024, expert_slots=slots, fused=slots is None
        ).best
        held = best.weights_held_bytes + best.cache_held_bytes + best.captured_bytes
        memory.append(_memory(f"engine, {slots or 'all'} experts of a layer, 8 x 1,024 tokens", peak.now, held))

    def __call__(self, batch: int, new: int) -> Row:
        self._decode(batch, 2)  # compiles
        spent, tokens, (hits, misses, copied) = self._decode(batch, new)
        row: Row = {"tokens/s": tokens / spent}
        if hits + misses:
            row |= {"hit rate": hits / (hits + misses), "MB copied per token": copied / tokens / 1e6}
            row["GB/s copied"] = copied / spent / 1e9
        return row

    def _decode(self, batch: int, new: int) -> tuple[float, int, list[int]]:
        """Seconds, tokens and counts behind the steps of the prompts."""
        import expertmesh as em

        params = em.SamplingParams(temperature=0, max_tokens=1 + new, ignore_eos=True)
        for prompt in _prompts(batch):
            self.engine.add(prompt, params)
        found: dict[str, int] = {}
        while len(found) < batch:
            found |= {output.request_id: len(output.token_ids) for output in self.engine.step()}
        before, began = self._counts(), time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        spent = time.perf_counter() - began
        counts = [after - old for after, old in zip(self._counts(), before, strict=True)]
        return spent, batch * (1 + new) - sum(found.values()), counts

    def _counts(self) -> list[int]:
        layers = self.engine.expert_paging()
        return [sum(getattr(one, name) for one in layers) for name in ("hits", "misses", "bytes_copied")]
