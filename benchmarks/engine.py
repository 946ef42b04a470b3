"""The engine against transformers, both of its ways: `generate` on a padded batch, and continuous batching.

    python -m benchmarks.engine                    # on one random Qwen3-MoE of 225 M parameters, BF16

Each contender has a process of its own with the same weights; all take turns, so that a busy machine is as busy for
each of them, and only the ratios of one run mean something. Each turn begins with a prompt that is not timed. Decoding
is the time of 129 tokens less that of 1; the mixed load is 32 requests at once, of which half begin with the same 256
tokens.
"""

import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.harness import Clock, checked, circumstances, write_report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

_now = time.perf_counter
"""Or the CPU time of this process, see `main`."""
VOCAB = 16384
NEW_TOKENS = 128
PROMPTS = 5
"""Timed prompts of a turn of the load `prefill`."""
LOADS = ("decode 1", "decode 4", "decode 16", "prefill", "mixed")


@dataclass(frozen=True)
class Sample:
    """What one contender took for one load.

    Attributes:
        rate: tokens per second: drawn ones, of a prompt where the load is `prefill`.
        first_s: median of the seconds to a request's first token; of the mixed load only.
    """

    rate: float
    first_s: float | None = None


@dataclass(frozen=True)
class Contender:
    """Something that answers requests.

    Attributes:
        run: gets prompts and numbers of new tokens; gives the new ids, and the seconds to each request's first token.
        scores: gets ids, and gives the logprob of each but the first.
    """

    run: Callable[[list[list[int]], list[int]], tuple[list[list[int]], list[float]]]
    scores: Callable[[list[int]], list[float]]


def write_model(path: Path, *, device: str = "cpu", **sizes: Any) -> None:
    """Write a random Qwen3-MoE with 8 layers, D = 512, F = 512, 32 experts and K = 4, or other sizes, wide enough that
    routing is not flat."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    usual = {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts_per_tok": 4,
    }
    config = Qwen3MoeConfig(
        **(usual | sizes),
        vocab_size=VOCAB,
        intermediate_size=2048,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        rope_theta=10000.0,
    )
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            std = parameter.shape[-1] ** -0.5 * (2.0 if ".gate." in name else 1.0)
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else std)
    model.to(torch.bfloat16).save_pretrained(path)
    words = {"<eos>": 0} | {f"<{i}>": i for i in range(1, VOCAB)}
    Tokenizer(WordLevel(words, unk_token="<eos>")).save(str(path / "tokenizer.json"))


def ours(path: str, *, device: str = "cpu", **options: Any) -> Contender:
    """Our engine with some options, warmed up."""
    import expertmesh as em

    engine = em.Engine(path, dtype="bfloat16", device=device, **options)
    engine.warm_up()

    def run(prompts: list[list[int]], new: list[int]) -> tuple[list[list[int]], list[float]]:
        began = _now()
        names = [
            engine.add(p, em.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
            for p, n in zip(prompts, new, strict=True)
        ]
        first: dict[str, float] = {}
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                first.setdefault(output.request_id, _now() - began)
                found[output.request_id] = output.token_ids
        return [list(found[n]) for n in names], [first[n] for n in names]

    def scores(ids: list[int]) -> list[float]:
        params = em.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (answer,) = engine.generate([ids], params)
        return [one.logprob for one in answer.prompt_logprobs if one is not None]

    return Contender(run, scores)


def _scores_of(model: Any) -> Callable[[list[int]], list[float]]:
    @torch.inference_mode()
    def scores(ids: list[int]) -> list[float]:
        ids_BS = torch.tensor([ids])
        found = model(ids_BS).logits[0, :-1].float().log_softmax(-1)
        return found.gather(1, ids_BS[0, 1:, None])[:, 0].tolist()

    return scores


def _transformers(path: str) -> Contender:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="grouped_mm").eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(prompts: list[list[int]], new: list[int]) -> tuple[list[list[int]], list[float]]:
        began = _now()
        most = max(map(len, prompts))
        ids = torch.tensor([[0] * (most - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(new),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found = [o[most : most + n].tolist() for o, n in zip(out, new, strict=True)]
        return found, [_now() - began] * len(prompts)

    return Contender(run, _scores_of(model))


def _continuous(path: str) -> Contender:
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    ).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=2048),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=128, max_batch_tokens=2048, allow_block_sharing=True
        ),
    )
    manager.start()

    def run(prompts: list[list[int]], new: list[int]) -> tuple[list[list[int]], list[float]]:
        began = _now()
        names = [
            manager.add_request(list(p), max_new_tokens=n, streaming=True) for p, n in zip(prompts, new, strict=True)
        ]
        first: dict[str, float] = {}
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
                continue
            if result.generated_tokens:
                first.setdefault(result.request_id, _now() - began)
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        answers = [found[name][:n] for name, n in zip(names, new, strict=True)]
        return answers, [first[name] for name in names]

    return Contender(run, _scores_of(model))


CONTENDERS: dict[str, Callable[[str], Contender]] = {
    "engine": ours,
    "engine, deterministic": lambda path: ours(path, deterministic=True),
    "transformers generate": _transformers,
    "transformers continuous": _continuous,
}


def _work(pipe: Connection, name: str, path: str, threads: int, clock: Clock) -> None:
    global _now
    if clock == "cpu":
        _now = time.process_time
    torch.set_num_threads(threads)
    contender = CONTENDERS[name](path)
    pipe.send(True)
    while True:
        kind, load, seed = pipe.recv()
        if kind == "stop":
            return
        pipe.send(contender.scores(load) if kind == "scores" else sample(contender, load, seed))


def sample(contender: Contender, load: str, seed: int) -> Sample:
    rng = random.Random(f"{load} {seed}")  # whose prompts no other load begins with, as caches keep prefixes
    contender.run([_ids(rng, 1024)], [2])  # untimed: what has waited for minutes has its memory away
    if load == "prefill":
        seconds = []
        for _ in range(PROMPTS):
            prompt = _ids(rng, 1024)
            began = _now()
            contender.run([prompt], [1])
            seconds.append(_now() - began)
        return Sample(1024 / statistics.median(seconds))
    if load == "mixed":
        prefix, prompts, new = _ids(rng, 256), [], []
        for i in range(32):
            shared = prefix if i % 2 else []
            prompts.append(shared + _ids(rng, rng.randint(16, 256 if i % 2 else 512)))
            new.append(rng.randint(16, 256))
        began = _now()
        answers, first = contender.run(prompts, new)
        elapsed = _now() - began
        assert [len(a) for a in answers] == new
        return Sample(sum(new) / elapsed, statistics.median(first))
    batch = int(load.split()[1])
    prompts = [_ids(rng, 32) for _ in range(batch)]
    seconds = []
    for n in (1, 1 + NEW_TOKENS):
        began = _now()
        answers, _ = contender.run(prompts, [n] * batch)
        seconds.append(_now() - began)
        assert [len(a) for a in answers] == [n] * batch
    return Sample(batch * NEW_TOKENS / (seconds[1] - seconds[0]))


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def main(
    contenders: tuple[str, ...] = tuple(CONTENDERS),
    loads: tuple[str, ...] = LOADS,
    rounds: int = 3,
    threads: int = 2,
    clock: Clock = "wall",
    model: Path | None = None,
    name: str | None = "engine_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        contenders: of `CONTENDERS`.
        loads: of `LOADS`.
        rounds: timed rounds, in which all take turns.
        threads: of each process.
        clock: wall time, or with one thread the CPU time of a process, which other work on the machine changes little.
        model: a folder as `write_model` makes it; none: it is made.
        name: of the result files; none: nothing is written.
        out: folder of the result files.
    """
    if clock == "cpu" and threads != 1:
        raise ValueError("clock is cpu, which counts one thread; use it with --threads 1")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder)
            write_model(model)
        context = multiprocessing.get_context("spawn")
        pipes: dict[str, Connection] = {}
        for one in contenders:
            pipes[one], end = context.Pipe()
            context.Process(target=_work, args=(end, one, str(model), threads, clock), daemon=True).start()
            pipes[one].recv()
        found = _measured(pipes, loads, rounds)
        for pipe in pipes.values():
            pipe.send(("stop", None, 0))
    rows = _rows(found)
    if name is None:
        print(json.dumps(rows, indent=1))
        return
    write_report(
        out / name,
        title="The engine and transformers on a random Qwen3-MoE (8 layers, D=512, F=512, E=32, K=4, BF16)",
        command=f"python -m benchmarks.engine --rounds {rounds} --threads {threads} --clock {clock}",
        notes=[
            (
                "Tokens per second, medians of rounds in which all take turns; `first token`: median of the mixed "
                "load's requests."
            )
        ],
        around=circumstances(clock=clock, peers={"transformers": _version()}),
        rows=rows,
    )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _asked(pipe: Connection, *what: Any) -> Any:
    pipe.send(what)
    return pipe.recv()


def _measured(pipes: dict[str, Connection], loads: tuple[str, ...], rounds: int) -> dict[str, dict[str, list[Sample]]]:
    ids = _ids(random.Random(1), 64)
    scores = {name: torch.tensor(_asked(pipe, "scores", ids, 0)) for name, pipe in pipes.items()}
    for name, own in scores.items():
        checked(name, lambda own=own: _all_alike(own, next(iter(scores.values()))))
    found: dict[str, dict[str, list[Sample]]] = {load: {name: [] for name in pipes} for load in loads}
    for number in range(-1, rounds):  # the first one warms up
        for load in loads:
            for name, pipe in pipes.items():
                sample = _asked(pipe, "load", load, number)
                if number >= 0:
                    found[load][name].append(sample)
                    print(load, name, sample, flush=True)
    return found


def _all_alike(own: torch.Tensor, other: torch.Tensor) -> None:
    """Logprobs that are of the same weights: they differ by what BF16 rounds, which may change an expert here and
    there."""
    assert (own - other).abs().median() < 0.1, f"logprobs {own} and {other}"


def _rows(found: dict[str, dict[str, list[Sample]]]) -> list[dict[str, Any]]:
    rows = []
    for load, samples in found.items():
        for name, many in samples.items():
            row: dict[str, Any] = {
                "load": load,
                "arm": name,
                "tokens/s": statistics.median(s.rate for s in many),
            }
            others = [[s.rate for s in samples[n]] for n in samples if n.startswith("transformers")]
            if others:
                # of each round, so that what the machine does besides meets both
                row["to transformers' better"] = statistics.median(
                    s.rate / max(rates) for s, *rates in zip(many, *others, strict=True)
                )
            if many[0].first_s is not None:
                row["first token s"] = statistics.median(s.first_s for s in many if s.first_s)
            rows.append(row)
    return rows


if __name__ == "__main__":
    tyro.cli(main)
