"""What a mixture costs to generate with, beside dense models and beside itself on plain PyTorch.

    python -m benchmarks.claims inference

Weights are random, in the shapes of the trained arms of `arms.py` and `languages.py` and eight times as wide; losses are those of
their pages.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.claims.arms import CLAIMS, dense_of, wider
from benchmarks.claims.einsum_gpt import EinsumGPT
from benchmarks.claims.languages import LANGUAGES
from benchmarks.harness import Contender, checked, circumstances, interleaved, write_report
from benchmarks.markdown import markdown_table

import expertmesh as em
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh_families.seq2seq import costs as seq2seq_costs
from expertmesh_families.seq2seq.config import Seq2SeqConfig
from expertmesh_families.seq2seq.model import Seq2Seq
from expertmesh.moe.layer import MoELayer
from expertmesh_families.seq2seq.beam import beam_search
from expertmesh.planner.serve import serve_plan
from expertmesh.planner.serving_layout import Serving

PROMPT, NEW_TOKENS, BATCHES = 32, 16, (1, 16)
TIMES_AS_WIDE = (1, 8)
LADDER = {"dense, 1 x": 1.0, "dense, 2 x": 1.5, "dense, 4 x": 2.0}
FAMILIES = {
    "moe": ("MoE",),
    "prmoe": ("PR-MoE-16/32", "MoE-64"),
    "mos": ("student, taught until 0.7", "teacher"),
    "languages": ("MoE-32, denoising",),
}
"""Arms of each claim whose shapes are timed; the first stands over the dense ladder and, where it is a GPT, is run on plain PyTorch."""
TRAINED = {
    "moe": {"dense, 1 x": "dense", "dense, 2 x": "dense, 2 x", "dense, 4 x": "dense, 4 x"},
    "languages": {"dense, 1 x": "dense, denoising", "dense, 2 x": "dense, 2 x, denoising"},
}
"""Arms that are the dense ladder of a claim; the ladders of the others are made of the mixture's shape."""
ON_PYTORCH = " on plain PyTorch"


def shapes(claim: str, times: float) -> dict[str, Any]:
    """The models of a family by name: configurations of GPTs or encoder-decoders."""

    def arm(name: str) -> Any:
        config: Any = {**CLAIMS, LANGUAGES.name: LANGUAGES}[claim].arm(name).configuration()
        return config.model

    trained = {name: arm(name) for name in FAMILIES[claim]}
    if claim in TRAINED:
        ladder = {name: arm(of) for name, of in TRAINED[claim].items()}
    else:
        dense = dense_of(next(iter(trained.values())))
        ladder = {name: wider(dense, ratio) for name, ratio in LADDER.items()}
    return {name: wider(config, times) for name, config in (trained | ladder).items()}


class OnEngine:
    """A batch that decodes on `em.Engine`."""

    def __init__(self, model: em.GPT) -> None:
        self.engine = em.Engine(model, compile=False, prefix_caching=False, cache_bytes=2**28)

    def begin(self, prompts: torch.Tensor, seed: int) -> None:
        """Read the prompts, and draw the first token of each."""
        for i, prompt in enumerate(prompts.tolist()):
            params = em.SamplingParams(
                temperature=1.0, max_tokens=1 + NEW_TOKENS, ignore_eos=True, seed=1000 * seed + i
            )
            self.engine.add(prompt, params)
        self.engine.step()

    def decode(self) -> None:
        """Draw the others."""
        steps = 0
        while self.engine.has_work:
            self.engine.step()
            steps += 1
        assert steps == NEW_TOKENS, f"{steps} steps for {NEW_TOKENS} tokens"


class OnPyTorch:
    """The same on plain PyTorch."""

    def __init__(self, model: em.GPT) -> None:
        self.gpt = EinsumGPT(model)
        self.ids = torch.empty(0)

    def begin(self, prompts: torch.Tensor, seed: int) -> None:
        """Read the prompts, and draw the first token of each."""
        torch.manual_seed(seed)
        self.gpt.begin(len(prompts), PROMPT + NEW_TOKENS)
        self.ids = self.gpt.step(prompts)

    def decode(self) -> None:
        """Draw the others."""
        for _ in range(NEW_TOKENS):
            self.ids = self.gpt.step(self.ids)


class OnBeamSearch:
    """Sources that an encoder-decoder reads and translates greedily; both are timed."""

    def __init__(self, model: Seq2Seq) -> None:
        self.model = model
        self.sources: list[list[int]] = []

    def begin(self, prompts: torch.Tensor, seed: int) -> None:
        """Take the sources."""
        self.sources = prompts.tolist()

    def decode(self) -> None:
        """Read them and write `NEW_TOKENS` for each; no token is an end."""
        found = beam_search(
            self.model,
            self.sources,
            start=(1,),
            end_id=self.model.config.vocab_size,
            num_beams=1,
            length_penalty=0,
            max_tokens=NEW_TOKENS,
        )
        assert all(len(one.ids) == NEW_TOKENS for one in found)


def prompts_of(config: ModelConfig | Seq2SeqConfig, batch: int, seed: int) -> torch.Tensor:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, PROMPT), generator=generator)


def check_same(model: em.GPT) -> None:
    """Whether plain PyTorch computes what our model does, prompt and next token."""
    ids = prompts_of(model.config, 3, seed=1)
    plain = EinsumGPT(model)
    plain.begin(3, PROMPT)
    with torch.inference_mode():
        expected = model(ids).logits_BSV
    for got, at in ((plain.logits(ids[:, :-1]), -2), (plain.logits(ids[:, -1:]), -1)):
        error = (got - expected[:, at]).abs().max() / expected.abs().max()
        assert error < 1e-4, f"logits differ by {error:.1e} of the largest"


def bytes_read(model: em.GPT, batch: int, *, all_experts: bool) -> float:
    """Bytes of weights that a decoding step reads, mean over a run: experts that no token chose are not read, unless all are."""
    moes: list[Any] = [block.moe for block in model.layers if block.moe is not None]
    per_expert = [moe.experts.w_in[0].numel() + moe.experts.w_out[0].numel() for moe in moes]
    held = [n * moe.num_experts for n, moe in zip(per_expert, moes, strict=True)]
    read = float(sum(p.numel() for p in model.parameters()))
    if moes and not all_experts:
        arm = OnEngine(model)
        arm.begin(prompts_of(model.config, batch, seed=0), seed=0)
        touched = 0
        before = arm.engine.expert_load()
        while arm.engine.has_work:
            arm.engine.step()
            after = arm.engine.expert_load()
            for n, old, new in zip(per_expert, before, after, strict=True):
                touched += n * sum(a > b for a, b in zip(new, old, strict=True))
            before = after
        assert touched, "no expert served a token"
        read += touched / NEW_TOKENS - sum(held)
    return read * model.embedding.weight.element_size()


def bytes_translated(model: Seq2Seq, batch: int) -> float:
    """Bytes of weights that are read from the sources to the last of `NEW_TOKENS`, divided by these."""

    def size(*modules: Any) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    moes = [module for module in model.modules() if isinstance(module, MoELayer)]
    memories = size(*(layer.cross_attention.kv for layer in model.decoder))
    per_token = size(model.decoder, model.final_norm, model.embedding) - memories
    experts = [moe.experts for moe in model.decoder.modules() if isinstance(moe, MoELayer)]
    once = size(model.encoder, model.encoder_norm) - size(*(moe.experts for moe in moes))
    read = once + size(*experts) + memories + NEW_TOKENS * (per_token - size(*experts))

    def count(moe: Any, _: Any, output: Any) -> None:
        nonlocal read
        one = moe.experts.w_in[0].numel() + moe.experts.w_out[0].numel()
        read += one * len(output[1].topk_expert_ids_TK.unique())

    hooks = [moe.register_forward_hook(count) for moe in moes]
    arm = OnBeamSearch(model)
    arm.begin(prompts_of(model.config, batch, seed=0), seed=0)
    arm.decode()
    for hook in hooks:
        hook.remove()
    return read * model.embedding.weight.element_size() / NEW_TOKENS


@dataclass(frozen=True)
class Timed:
    """What a family's models took at one width and batch, by name."""

    step_s: dict[str, float]
    bytes_read: dict[str, float]


def timed(models: dict[str, Any], batch: int, rounds: int) -> Timed:
    """All in turn."""
    first = next(iter(models))
    is_gpt = isinstance(models[first], em.GPT)
    arms: dict[str, Any] = {
        name: (OnEngine if is_gpt else OnBeamSearch)(m) for name, m in models.items()
    }
    if is_gpt:
        arms[first + ON_PYTORCH] = OnPyTorch(models[first])
    config = models[first].config
    timings = interleaved(
        [
            Contender(
                name,
                arm.decode,
                lambda number, arm=arm: arm.begin(prompts_of(config, batch, number), number),
            )
            for name, arm in arms.items()
        ],
        rounds=rounds,
        clock="cpu",
    )
    if is_gpt:
        read = {name: bytes_read(m, batch, all_experts=False) for name, m in models.items()}
        read[first + ON_PYTORCH] = bytes_read(models[first], batch, all_experts=True)
    else:
        read = {name: bytes_translated(m, batch) for name, m in models.items()}
    return Timed({t.name: t.median_s / NEW_TOKENS for t in timings}, read)


def losses(claim: str) -> dict[str, float]:
    """Mean validation loss over seeds of each arm's longest run."""
    runs = json.loads(Path(f"docs/results/{claim}.json").read_text())["runs"].values()
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["seed"] != 99 and run["part"] == 20:
            found.setdefault(run["arm"], []).append(run["loss"])
    by_name = {name: statistics.mean(many) for name, many in found.items()}
    ladder = TRAINED.get(claim, {})
    return by_name | {name: by_name[of] for name, of in ladder.items() if of in by_name}


def operations(config: Any) -> float:
    """Forward FLOPs per token; of an encoder-decoder those of what is timed, over its new tokens."""
    if isinstance(config, Seq2SeqConfig):
        found = seq2seq_costs.forward_flops(config, source_len=PROMPT, target_len=NEW_TOKENS)
        return found.source_flops * PROMPT / NEW_TOKENS + found.target_flops
    return forward_flops(config, seq_len=config.max_seq_len).total_flops


def break_even(own_s: float, ladder: list[tuple[float, float]]) -> str:
    """At which operations per token, over those of the mixture, a dense model takes as long; lines between the logarithms.

    Args:
        own_s: of a step of the mixture.
        ladder: (ratio of operations, seconds) of dense models.
    """
    if own_s < ladder[0][1]:
        return f"< {ladder[0][0]:.2f}"
    for (low, low_s), (high, high_s) in zip(ladder, ladder[1:], strict=False):
        if low_s <= own_s <= high_s:
            share = math.log(own_s / low_s) / math.log(high_s / low_s)
            return f"{low * (high / low) ** share:.2f}"
    return f"> {ladder[-1][0]:.1f}"


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    """The rows: family, width and batch after one another."""
    for times in TIMES_AS_WIDE:
        for claim in FAMILIES:
            configs = shapes(claim, times)
            models: dict[str, Any] = {
                name: (Seq2Seq if isinstance(config, Seq2SeqConfig) else em.GPT)(config, seed=0).eval()
                for name, config in configs.items()
            }
            flops = {name: operations(config) for name, config in configs.items()}
            first = next(iter(models))
            if isinstance(models[first], em.GPT):
                checked(first, partial(check_same, models[first]))
            known = losses(claim)
            for batch in BATCHES:
                found = timed(models, batch, rounds)
                steps = found.step_s
                ladder = [
                    (flops[name] / flops[first], steps[name]) for name in LADDER if name in steps
                ]
                for name, step_s in steps.items():
                    plain = name.removesuffix(ON_PYTORCH)
                    yield {
                        "family": claim,
                        "times as wide": times,
                        "batch": batch,
                        "model": name,
                        "nats": known.get(plain) if times == 1 else None,
                        "operations": round(flops[plain] / flops[first], 2),
                        "parameters, M": round(
                            sum(p.numel() for p in models[plain].parameters()) / 1e6, 2
                        ),
                        "ms per token": round(1e3 * step_s, 3),
                        "tokens/s": round(batch / step_s, 1),
                        "MB of weights read": round(found.bytes_read[name] / 1e6, 3),
                        "time over the mixture's": round(step_s / steps[first], 2),
                        "break-even": break_even(step_s, ladder) if name == first else None,
                    }


def dense_175b() -> Any:
    """GPT-3's shape."""
    widths = {"model.dim": 12288, "model.ffn_hidden_dim": 4 * 12288, "model.head_dim": 128}
    heads = {"model.num_layers": 96, "model.num_heads": 96, "model.num_kv_heads": 96}
    return em.recipe("gpt-6.7b", {**widths, **heads})


def planned() -> list[dict[str, Any]]:
    """The planner's rows of the published pairs; the first of a pair is the dense model that the others are compared with."""
    pairs = (
        (
            ("6.7B dense", "gpt-6.7b", "a100-40x1"),
            ("52B mixture", "gpt-1.3b-moe128", "a100-40x8"),
            ("52B mixture", "gpt-1.3b-moe128", "a100-40x128"),
            ("27B PR-MoE student", "gpt-1.3b-mos", "a100-40x8"),
            ("27B PR-MoE student", "gpt-1.3b-mos", "a100-40x128"),
        ),
        (
            ("175B dense", dense_175b(), "a100-80x8"),
            ("1T mixture", "gpt-1t-moe128", "a100-40x128"),
            ("1T mixture", "gpt-1t-moe128", "a100-40x256"),
            ("1T mixture", "gpt-1t-moe128", "a100-80x128"),
        ),
    )
    rows = []
    for pair in pairs:
        for each in (1, 4):
            base: Serving | None = None
            for words, model, cluster in pair:
                number = int(cluster.rpartition("x")[2])
                best = serve_plan(model, cluster=cluster, batch=each * number, context=1024).best
                base = base or best
                rows.append(
                    {
                        "model": words,
                        "cluster": cluster,
                        "sequences per GPU": each,
                        "ways": f"tensor {best.tp_degree}, experts {best.route_degree}",
                        "ms per token": f"{1e3 * best.seconds.total_s:.1f}",
                        "times faster": f"{base.seconds.total_s / best.seconds.total_s:.2f}",
                        "GPU ms per token": f"{gpu_ms(best):.2f}",
                        "times cheaper": f"{gpu_ms(base) / gpu_ms(best):.2f}",
                    }
                )
    return rows


def gpu_ms(way: Serving) -> float:
    """Milliseconds of one GPU per generated token."""
    return 1e3 * way.cluster.num_gpus / way.tokens_per_s


def main(rounds: int = 3, out: Path = Path("benchmarks/results/inference_cpu_202611")) -> None:
    """Check, time, write.

    Args:
        rounds: timed rounds, in which all models of a family take turns.
        out: report, without suffix.
    """
    torch.set_num_threads(1)
    rows = []
    for row in measured(rounds):
        rows.append(row)
        print(row, flush=True)
    write_report(
        out,
        title="What a mixture costs to generate with",
        command="python -m benchmarks.claims inference",
        notes=[
            f"FP32, random weights, prompts of {PROMPT} tokens that are not counted, then {NEW_TOKENS} steps at temperature 1.",
            f"Medians of {rounds} interleaved rounds. What it says: docs/results/inference.md.",
        ],
        around=circumstances(clock="cpu"),
        rows=rows,
    )
    print(markdown_table(planned()))
