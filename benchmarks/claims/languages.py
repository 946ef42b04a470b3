"""Twelve languages: mixtures of experts against dense models of the same operations, with and without denoising."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.claims.arms import Arm, Claim
from benchmarks.claims.pages import compared, draw, ladders, ratio_cells, reported, sweeps
from benchmarks.claims.runs import PARTS, SWEEP_SEED, Job, Ledger, evaluated
from benchmarks.claims.statistics import token_ratio
from benchmarks.markdown import markdown_table

from expertmesh.config.run import RunConfig
from expertmesh_families.seq2seq.config import Seq2SeqRunConfig
from expertmesh_families.seq2seq.costs import forward_flops, seq2seq_costs
from expertmesh_families.seq2seq.parallel_text import read_lines
from expertmesh_families.seq2seq.translate import translate
from expertmesh_families.seq2seq.scores import score
from expertmesh_families.seq2seq.task import Seq2SeqTask
from expertmesh_families.seq2seq.recipes import translate_twelve
from expertmesh.runs.open import LoadedModel
from expertmesh.runs.run_dir import Run

Found = dict[str, Any]
SMALL = {
    "model.vocab_size": 3000,
    "model.max_source_len": 128,
    "model.max_seq_len": 128,
    "model.dim": 64,
    "model.ffn_hidden_dim": 256,
    "model.dropout": 0.0,
    "optim.name": "muon",
    "optim.schedule": "wsd",
    "optim.min_lr_ratio": 0.0,
    "optim.warmup_steps": 200,
    "train.tensorboard": False,
}
"""Of all arms, over the recipe translate-twelve."""
ZERO_SHOT = ("cs-fr", "fr-cs")
FOLDERS = {"help": "lohelp", "pictures": "multi30k"}
"""Each domain's folder below --data."""
TESTS = {"help": "test", "pictures": "test_2016_flickr"}
LINES = {"help": 100, "pictures": 50}
"""Of each direction, evenly spread over the lines that both languages have."""
VALIDATION_SAMPLES = 5200
RESAMPLES = 2000


@dataclass(frozen=True)
class LanguageArm(Arm):
    """One of the encoder-decoders that are compared."""

    def configuration(self, changes: Mapping[str, Any] | None = None) -> Seq2SeqRunConfig:
        """The arm's run with a few more changes; seed, steps and folder are to come."""
        return translate_twelve().updated(
            {**SMALL, "optim.lr": self.lr, **self.changes, **(changes or {})}
        )


def _arm(name: str, num_experts: int, denoising: float, **changes: Any) -> LanguageArm:
    dense: dict[str, Any] = {"model.moe.num_experts": ()}
    dense["model.ffn_hidden_dim"] = 264  # with the operations of a router of 32
    mixture = {"model.moe.num_experts": (num_experts,), "model.moe.hidden_dim": 256}
    shape = mixture if num_experts else dense
    swept = "MoE-8" if num_experts else "dense"
    return LanguageArm(
        name,
        {**shape, "data.denoising": denoising, **changes},
        lr=12e-3,
        rate_of=None if name == swept else swept,
    )


DENOISING = 0.3
_TWICE = {"model.dim": 96, "model.ffn_hidden_dim": 392}
"""About twice the operations of the others, tokens' matrix included."""
_NARROW = {"model.dim": 32, "model.ffn_hidden_dim": 128}
_ALONE = {"data.without_pairs": ()}
LANGUAGES = Claim(
    name="languages",
    title="Twelve languages: mixtures of experts against dense models",
    question="At equal operations, how much earlier does a mixture of experts reach the loss of a dense model over twelve "
    "languages, how much better does it translate, and what do denoising and the other languages add?",
    arms=(
        _arm("MoE-32, denoising", 32, DENOISING),
        _arm("MoE-8, denoising", 8, DENOISING),
        _arm("dense, denoising", 0, DENOISING),
        _arm("dense, 2 x, denoising", 0, DENOISING, **_TWICE),
        _arm("MoE-32", 32, 0.0),
        _arm("MoE-8", 8, 0.0),
        _arm("dense", 0, 0.0),
        _arm("dense, en-de alone", 0, 0.0, **_ALONE, **{"data.pairs": ("en-de",)}),
        _arm("dense, en-fr alone", 0, 0.0, **_ALONE, **{"data.pairs": ("en-fr",)}),
    ),
    text="LibreOffice's help and Multi30k, tokens learned from both",
    steps=2000,
    parts=(PARTS, 10, 7, 5, 4),
    ladder=("MoE-32, denoising", "MoE-8, denoising", "MoE-32", "MoE-8"),
    single=(
        "dense, 2 x, denoising",
        "MoE-32",
        "MoE-8",
        "dense",
        "dense, en-de alone",
        "dense, en-fr alone",
    ),
)
NARROW = replace(
    LANGUAGES,
    name="languages-narrow",
    title="Twelve languages, 32 wide: the same question after more tokens for each parameter",
    question="At 64 wide a model saw 7 tokens for each active parameter. How much earlier does a mixture of experts reach the dense "
    "model's loss, and how much better does it translate, after 100?",
    arms=(
        _arm("MoE-32", 32, 0.0, **_NARROW | {"model.moe.hidden_dim": 128}),
        _arm("dense", 0, 0.0, **_NARROW | {"model.ffn_hidden_dim": 136}),
    ),
    steps=8000,
    ladder=("MoE-32",),
    single=(),
    sweeps=False,
)
"""Rates are the best of `LANGUAGES`."""
CLAIMS = {claim.name: claim for claim in (LANGUAGES, NARROW)}
TWINS = {
    "MoE-32, denoising": "dense, denoising",
    "MoE-8, denoising": "dense, denoising",
    "MoE-32": "dense",
    "MoE-8": "dense",
}
"""The dense model that learned from the same samples."""


def folders(data: str) -> dict[str, Any]:
    """The changes to a run that make it learn from the folders of `FOLDERS` below one."""
    return {"data.path": tuple(str(Path(data) / name) for name in FOLDERS.values())}


def measure(config: RunConfig, job: Job) -> Found:
    """A finished run's losses and costs; of the longest ones the translations' scores, too."""
    assert isinstance(config, Seq2SeqRunConfig)
    run, trained, evaluation = evaluated(config, max_samples=VALIDATION_SAMPLES)
    losses = {
        pair: evaluation.get(f"loss_{pair}", evaluation["loss"])
        for pair in (*config.data.pairs, *config.data.without_pairs)
    }
    costs = seq2seq_costs(config, num_ranks=1, dtype="float32")
    flops = forward_flops(config.model, source_len=32, target_len=32)
    found: Found = {
        "loss": statistics.fmean(losses[pair] for pair in config.data.pairs),
        "losses": {pair: round(loss, 4) for pair, loss in losses.items()},
        "samples": job.steps * config.train.batch_size,
        "parameters": costs.parameters,
        "active_parameters": costs.active,
        "forward_flops_per_pair_of_tokens": flops.source_flops + flops.target_flops,
    }
    if job.part == PARTS and job.seed != SWEEP_SEED:
        found["scores"] = scores(config, run, trained)
    return found


def test_lines(folder: Path, domain: str, pair: str) -> list[tuple[str, str]]:
    """Sources and references of a direction; none where a language has no file."""
    files = [folder / f"{TESTS[domain]}.{code}.gz" for code in pair.split("-")]
    if not all(file.exists() for file in files):
        return []
    both = [
        (source, target)
        for source, target in zip(*map(read_lines, files), strict=True)
        if source.strip() and target.strip() and max(len(source), len(target)) <= 200
    ]
    count = min(LINES[domain], len(both))
    return [both[place * len(both) // count] for place in range(count)]


@torch.no_grad()
def scores(config: Seq2SeqRunConfig, run: Run, trained: LoadedModel) -> Found:
    """chrF and BLEU of each domain and direction, and the chrF of each line in tenths; greedy decoding."""
    task, tokenizer = trained.task, run.load_tokenizer()
    assert isinstance(task, Seq2SeqTask)
    found: Found = {}
    for (domain, _), folder in zip(FOLDERS.items(), config.data.path, strict=True):
        found[domain] = {}
        for pair in (*config.data.pairs, *config.data.without_pairs):
            lines, target = test_lines(Path(folder), domain, pair), pair.split("-")[1]
            if not lines:
                continue
            sources, references = map(list, zip(*lines, strict=True))
            with trained.precision.autocast():
                ours = translate(
                    task.builder.decoder(trained.model),
                    tokenizer,
                    task.builder.translation(tokenizer, to=target),
                    sources,
                    num_beams=1,
                    batch_size=50,
                )
            bleu, chrf = score(ours, references, language=target)
            found[domain][pair] = {
                "bleu": round(bleu.value, 2),
                "chrf": round(chrf.value, 2),
                "lines": " ".join(map(str, chrf_of_lines(ours, references))),
            }
    return found


def chrf_of_lines(ours: Sequence[str], references: Sequence[str]) -> list[int]:
    """chrF of each line, in tenths."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    return [
        round(10 * metric.sentence_score(line, [reference]).score)
        for line, reference in zip(ours, references, strict=True)
    ]


def average(scores: Found, domain: str, pairs: Iterable[str], metric: str = "chrf") -> float | None:
    """Mean over those directions that were translated."""
    values = [scores[domain][pair][metric] for pair in pairs if pair in scores[domain]]
    return statistics.fmean(values) if values else None


def gain(sides: Sequence[tuple[Found, Found]], domain: str) -> tuple[float, float, float] | None:
    """Mean gain of the first of each pair in chrF of a line, over directions that both were taught, and its 95 % interval.

    Args:
        sides: scores of two arms for each seed.
        domain: of the lines.
    """
    gains = [
        {
            pair: np.subtract(*(_lines(side[domain][pair]) for side in (ours, others)))
            for pair in ours[domain]
            if pair in others[domain] and pair not in ZERO_SHOT
        }
        for ours, others in sides
    ]
    if not gains or not gains[0]:
        return None
    draws = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        seeds = draws.integers(len(gains), size=len(gains))
        of_pairs = []
        for pair, first in gains[0].items():
            lines = draws.integers(len(first), size=len(first))
            of_pairs.append(np.mean([gains[seed][pair][lines] for seed in seeds]))
        means[number] = np.mean(of_pairs)
    mean = float(np.mean([np.mean([g.mean() for g in of.values()]) for of in gains]))
    low, high = np.quantile(means, (0.025, 0.975))
    return mean, float(low), float(high)


def _lines(of_pair: Found) -> np.ndarray:
    """(lines,) chrF."""
    return np.array(of_pair["lines"].split(), dtype=np.float64) / 10


def write_page(claim: Claim, ledger: Ledger, out: Path) -> None:
    """docs/results/languages.md and .svg from the finished runs; nothing where there are none."""
    runs = reported(ledger)
    if not runs:
        return
    text = [
        f"# {claim.title}",
        f"**Question.** {claim.question}",
        *_protocol(claim, ledger),
        markdown_table(list(_rows(claim, runs))),
        *_steps(claim, runs),
        *_gains(claim, runs),
        *_directions(claim, runs),
        "\n".join(sweeps(ledger)),
        *draw(claim, runs, claim.ladder, out, by="samples", y_label="nats per target token"),
    ]
    (out / f"{claim.name}.md").write_text("\n\n".join(text) + "\n")


def _protocol(claim: Claim, ledger: Ledger) -> list[str]:
    about = ledger.about
    config = claim.arms[0].configuration()
    assert isinstance(config, Seq2SeqRunConfig)
    return [
        (
            f"**Protocol.** Recipe `translate-twelve`: {about['text']}; English from and to eleven languages and "
            f"German from and to French and Czech; Czech and French never meet. 4 + 2 layers, {config.model.dim} wide, "
            f"{config.model.vocab_size:,} tokens, experts (top-1) in every other layer of both sides; all arms have "
            "the same tokens and as many samples, and matrices are trained with Muon. "
            f"{about.get('steps') or claim.steps:,} steps, {about['dtype']}, {about['threads']} thread(s), torch "
            f"{about['torch']}. Losses: mean over the directions taught, without label smoothing, of finished "
            f"schedules only, {VALIDATION_SAMPLES:,} lines of validation. Translations: greedy, of lines of the test "
            "files evenly spread over them (at most "
            + " and ".join(f"{count} of each direction for {name}" for name, count in LINES.items())
            + "), scored by sacreBLEU. Intervals: bootstrap over seeds and lines, paired by both."
        ),
        f"    python -m benchmarks.claims {claim.name} --data FOLDER      # lohelp and multi30k below it",
    ]


def _longest(runs: list[Found], arm: str) -> dict[int, Found]:
    """By seed."""
    return {r["seed"]: r for r in runs if r["arm"] == arm and r["part"] == PARTS}


def _mean_of(values: Iterable[float | None], form: str = ".1f") -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):{form}}" if known else ""


def _rows(claim: Claim, runs: list[Found]) -> Iterator[dict[str, Any]]:
    for arm in claim.arms:
        found = list(_longest(runs, arm.name).values())
        if not found:
            continue
        one, of = found[0], [r["scores"] for r in found]
        taught = [pair for pair in one["losses"] if pair not in ZERO_SHOT]
        seconds = [r["cpu_seconds"] for r in found if "cpu_seconds" in r]
        yield {
            "model": arm.name,
            "seeds": len(found),
            "parameters (active), M": f"{one['parameters'] / 1e6:.2f} ({one['active_parameters'] / 1e6:.2f})",
            "M operations": f"{one['forward_flops_per_pair_of_tokens'] / 1e6:.2f}",
            "nats": _mean_of((r["loss"] for r in found), ".3f"),
            **{
                f"chrF, {domain}": _mean_of(average(scores, domain, taught) for scores in of)
                for domain in FOLDERS
            },
            **{
                f"never taught, {domain}": _mean_of(
                    average(scores, domain, ZERO_SHOT) for scores in of
                )
                for domain in FOLDERS
            },
            "CPU, s": _mean_of(seconds, ".0f"),
        }


def _steps(claim: Claim, runs: list[Found]) -> list[str]:
    rows = []
    for name in claim.ladder:
        twin = TWINS[name]
        of_mixture, of_twin = ladders(runs, name, "samples"), _longest(runs, twin)
        found = []
        for seed in compared(of_mixture, of_twin):
            samples, loss = of_twin[seed]["samples"], of_twin[seed]["loss"]
            found.append(token_ratio(of_mixture[seed], {samples: loss}, samples))
        if found and None not in found:
            cells = dict(zip(("each seed", "mean", "95 %"), ratio_cells(found), strict=True))
            rows.append({"model": name, "than": twin, **cells})
    said = (
        "**Steps.** How many times fewer steps a finished run of a mixture needs for the loss that the dense model has at the end "
        "(finished runs of 1/5, 1/4, 7/20, 1/2 and all of the steps; between them by the logarithm of steps):"
    )
    return [said, markdown_table(rows)] if rows else []


def _gains(claim: Claim, runs: list[Found]) -> list[str]:
    others = {
        "dense, denoising": "dense",
        "dense, 2 x, denoising": "dense, denoising",
        "dense, en-de alone": "dense",
        "dense, en-fr alone": "dense",
        "MoE-32, denoising": "MoE-32",
        "MoE-8, denoising": "MoE-8",
    }
    rows = []
    for first, second in (*TWINS.items(), *others.items()):
        ours, theirs = _longest(runs, first), _longest(runs, second)
        sides = [(ours[s]["scores"], theirs[s]["scores"]) for s in ours if s in theirs]
        row: dict[str, Any] = {"model": first, "against": second, "seeds": len(sides)}
        for domain in FOLDERS:
            found = gain(sides, domain)
            row[domain] = "" if found is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*found)
        if sides:
            rows.append(row)
    said = "**Translations.** Gain in chrF, mean over lines and over the directions that both were taught, with its 95 % interval:"
    return [said, markdown_table(rows)] if rows else []


def _directions(claim: Claim, runs: list[Found]) -> list[str]:
    shown = [arm.name for arm in claim.arms if _longest(runs, arm.name)]
    parts = []
    for domain in FOLDERS:
        pairs = list(
            dict.fromkeys(
                pair
                for name in shown
                for run in _longest(runs, name).values()
                for pair in run["scores"][domain]
            )
        )
        rows = [
            {f"chrF, {domain}": pair + (" (never taught)" if pair in ZERO_SHOT else "")}
            | {
                name: _mean_of(
                    average(run["scores"], domain, [pair]) for run in _longest(runs, name).values()
                )
                for name in shown
            }
            for pair in pairs
        ]
        if rows:
            parts.append(markdown_table(rows))
    return parts
