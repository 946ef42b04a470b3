"""A claim's page: question, protocol, table, ratios with intervals, and a curve."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.arms import Claim
from benchmarks.claims.runs import PARTS, SWEEP_SEED, Ledger
from benchmarks.claims.statistics import (
    Ladder,
    bootstrap,
    geometric_mean,
    mean,
    token_ratio,
    tokens_at,
)
from benchmarks.curves import plot

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.spec import count_parameters

Found = dict[str, Any]


def reported(ledger: Ledger) -> list[Found]:
    """The runs that count: not those of a sweep."""
    return [run for run in ledger.runs.values() if run["seed"] != SWEEP_SEED]


def ladders(runs: list[Found], arm: str, by: str = "tokens") -> dict[int, Ladder]:
    """Finished losses by what was seen, tokens or samples, for each seed."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for run in runs:
        if run["arm"] == arm:
            found[run["seed"]][run[by]] = run["loss"]
    return found


def draw(
    claim: Claim, runs: list[Found], arms: Iterable[str], out: Path, *, by: str, y_label: str
) -> list[str]:
    """Writes NAME.svg, the losses of the arms that have several budgets, and returns its line of the page; [] where none has."""
    curves = {name: [sorted(c.items()) for c in ladders(runs, name, by).values()] for name in arms}
    curves = {name: lines for name, lines in curves.items() if any(len(line) > 1 for line in lines)}
    if not curves:
        return []
    picture = plot(curves, x_label=f"{by} of a finished run", y_label=y_label, is_log=True)
    (out / f"{claim.name}.svg").write_text(picture)
    return [f"![losses of finished runs against their {by}]({claim.name}.svg)"]


def write_page(claim: Claim, ledger: Ledger, out: Path) -> None:
    """docs/results/NAME.md and NAME.svg from the finished runs; nothing where there are none."""
    runs = reported(ledger)
    if not runs:
        return
    text = [
        f"# {claim.title}",
        "",
        f"**Question.** {claim.question}",
        "",
        *_protocol(claim, ledger),
        "",
        *_table(claim, runs),
    ]
    if claim.ladder:
        text += ["", *_token_ratios(claim, runs), *_width(claim, runs)]
    else:
        text += ["", *_differences(claim, runs), *_positions(claim, runs)]
    text += ["", *sweeps(ledger)]
    y_label = "validation loss, nats per token"
    picture = draw(claim, runs, (arm.name for arm in claim.arms), out, by="tokens", y_label=y_label)
    if picture:
        text += ["", *picture]
    (out / f"{claim.name}.md").write_text("\n".join([*text, ""]))


def _protocol(claim: Claim, ledger: Ledger) -> list[str]:
    about = ledger.about
    return [
        (
            "**Protocol.** One small GPT with other feed-forward layers in each arm: same data in the same order, same tokenizer, "
            f"same operations per token where the table shows so. {about['text']}; {about['dtype']}, "
            f"{about['threads']} thread(s), torch {about['torch']}. Only finished schedules count (warm-up, stable, linear decay to 0 "
            "in the last fifth); losses in nats per token on the whole validation split. Peak rates: see below. 95 % intervals: "
            "bootstrap over seeds (of three seeds little more than the least and the most)."
        ),
        "",
        f"    python -m benchmarks.claims {claim.name}",
    ]


def _table(claim: Claim, runs: list[Found]) -> list[str]:
    lines = [
        "| model | seeds | parameters (active), M | of experts, M | M operations per token | tokens, M | nats | bits/byte | copies | CPU, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in claim.arms:
        longest = [r for r in runs if r["arm"] == arm.name and r["part"] == PARTS]
        if not longest:
            continue
        one = longest[0]
        config = arm.configuration()
        assert isinstance(config, GPTRunConfig)
        seconds = [r["cpu_seconds"] for r in longest if "cpu_seconds" in r]
        lines.append(
            f"| {arm.name} | {len(longest)} | {one['parameters'] / 1e6:.2f} ({one['active_parameters'] / 1e6:.2f}) | "
            f"{count_parameters(config.model).experts / 1e6:.2f} | {one['forward_flops_per_token'] / 1e6:.2f} | "
            f"{one['tokens'] / 1e6:.1f} | {mean([r['loss'] for r in longest]):.4f} | "
            f"{mean([r['bits_per_byte'] for r in longest]):.4f} | "
            f"{mean([r['nats_saved_by_repetition'] for r in longest]):.2f} | "
            f"{f'{mean(seconds):.0f}' if seconds else ''} |"
        )
    return [
        *lines,
        "",
        "Copies: nats per token that random tokens cost less when they come a second time; near 0, no induction heads were found.",
    ]


def _token_ratios(claim: Claim, runs: list[Found]) -> list[str]:
    ours, dense = claim.ladder
    better, other = ladders(runs, ours), ladders(runs, dense)
    seeds = compared(better, other)
    if not seeds:
        return []
    of = {r["arm"]: r for r in runs}
    flops = of[ours]["forward_flops_per_token"] / of[dense]["forward_flops_per_token"]
    active = of[dense]["active_parameters"]
    lines = [
        (
            f"**Token-equivalent.** Tokens of the {dense} model over those after which a finished {ours} run has its loss, divided by "
            f"the ratio of operations per token ({flops:.3f})."
        ),
        "",
        "| dense tokens per active parameter | ratio for each seed | mean | 95 % |",
        "|---|---|---|---|",
    ]
    for tokens in sorted(set.intersection(*(set(other[s]) for s in seeds))):
        found = [token_ratio(better[s], other[s], tokens, flops=flops) for s in seeds]
        lines.append(f"| {tokens / active:.0f} | {' | '.join(ratio_cells(found))} |")
    return lines


def compared(ours: dict[int, Ladder], others: Mapping[int, Any]) -> list[int]:
    """Seeds for which a ratio can be told: both have finished, and ours with several budgets, as one is only a bound."""
    return sorted(seed for seed in ours if seed in others and len(ours[seed]) > 1)


def ratio_cells(found: Sequence[tuple[float, bool] | None]) -> tuple[str, str, str]:
    """Each seed's ratio, as `token_ratio` gives it, their mean and its interval; these two are empty where a ratio is not known."""
    each = ", ".join(
        "above the longest" if f is None else f"{'> ' * f[1]}{f[0]:.2f}" for f in found
    )
    known = [f for f in found if f is not None]
    if len(known) < len(found):
        return each, "", ""
    values, bound = [value for value, _ in known], "> " * any(is_bound for _, is_bound in known)
    mean_of = f"{bound}{geometric_mean(values):.2f}"
    return each, mean_of, interval(values, geometric_mean, ".2f")


def interval(values: list[float], statistic: Callable[[Sequence[float]], float], form: str) -> str:
    """Of 95 %; one seed has none."""
    if len(values) == 1:
        return "one seed"
    low, high = bootstrap(values, statistic)
    return f"{low:{form}} to {high:{form}}"


def _width(claim: Claim, runs: list[Found]) -> list[str]:
    longest = {r["arm"]: r for r in runs if r["part"] == PARTS and r["seed"] == runs[0]["seed"]}
    dense = [claim.ladder[1], *(arm.name for arm in claim.arms if arm.name not in claim.ladder)]
    wide = [longest[name] for name in dense if name in longest]
    ours = longest.get(claim.arms[0].name)
    if ours is None or len(wide) < 2:
        return []
    losses = {round(r["forward_flops_per_token"]): r["loss"] for r in wide}
    widest, base = max(losses), wide[0]["forward_flops_per_token"]
    if ours["loss"] < losses[widest]:
        said = f"more than {widest / base:.1f}: the widest dense model is worse"
    else:
        flops = tokens_at(losses, ours["loss"])
        said = "less than 1" if flops is None else f"{flops / ours['forward_flops_per_token']:.2f}"
    return [
        "",
        (
            f"**Width-equivalent** (seed {ours['seed']}): operations per token of the dense model, trained on as many tokens, that has the "
            f"same loss, over those of the {ours['arm']}: **{said}**."
        ),
    ]


def _differences(claim: Claim, runs: list[Found]) -> list[str]:
    first = claim.arms[0].name
    losses = {arm.name: ladders(runs, arm.name) for arm in claim.arms}

    def last(arm: str, seed: int) -> float:
        ladder = losses[arm][seed]
        return ladder[max(ladder)]

    lines = [
        f"Nats by which {first} is better (negative: worse), seed by seed:",
        "",
        "| than | each seed | mean | 95 % |",
        "|---|---|---|---|",
    ]
    for arm in claim.arms[1:]:
        seeds = sorted(set(losses[first]) & set(losses[arm.name]))
        if seeds:
            gains = [last(arm.name, s) - last(first, s) for s in seeds]
            each = ", ".join(f"{g:+.4f}" for g in gains)
            lines.append(
                f"| {arm.name} | {each} | {mean(gains):+.4f} | {interval(gains, mean, '+.4f')} |"
            )
    return lines


def _positions(claim: Claim, runs: list[Found]) -> list[str]:
    found = {
        arm.name: [
            r["dropped_by_position"]
            for r in runs
            if r["arm"] == arm.name and r.get("dropped_by_position")
        ]
        for arm in claim.arms
    }
    found = {name: shares for name, shares in found.items() if shares}
    if not found:
        return []
    parts = len(next(iter(found.values()))[0])
    lines = [
        "",
        f"Rows dropped in training by their place in the sample, in {parts} parts from its start to its end, %:",
        "",
        f"| model | {' | '.join(str(part + 1) for part in range(parts))} |",
        f"|---|{'---|' * parts}",
    ]
    for name, shares in found.items():
        each = " | ".join(f"{100 * mean(list(part)):.1f}" for part in zip(*shares, strict=True))
        lines.append(f"| {name} | {each} |")
    return lines


def sweeps(ledger: Ledger) -> list[str]:
    """Where the rates come from."""
    swept = [run for run in ledger.runs.values() if run["seed"] == SWEEP_SEED]
    if not swept:
        return ["Peak rates were not swept: all arms have the same."]
    lines = [
        f"Peak rates: the best of a sweep with seed {SWEEP_SEED}, which is not reported, at a quarter of the tokens:",
        "",
        "| model | rate: nats |",
        "|---|---|",
    ]
    by_arm: dict[str, list[str]] = defaultdict(list)
    for run in sorted(swept, key=lambda run: run["lr"]):
        by_arm[run["arm"]].append(f"{run['lr']:g}: {run['loss']:.4f}")
    return [*lines, *(f"| {arm} | {', '.join(found)} |" for arm, found in by_arm.items())]
