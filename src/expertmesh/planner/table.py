"""Tables of the planner as plain text."""

from collections.abc import Sequence
from dataclasses import fields

from expertmesh.costs.memory import GIB, PeakMemory
from expertmesh.costs.step_time import StepSeconds
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.planner.configured import as_configured
from expertmesh.planner.search import SAFE, Candidate
from expertmesh.planner.search_result import ERROR_BAR, MEMORY_BAR, SearchResult
from expertmesh.planner.why import why_not, words_of


def columns(rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Rows as lines with aligned columns.

    Args:
        rows: rows of equally many texts; the first row is the head.
        right: alignment of each column, "l" or "r"; missing ones are "l".
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if right[place : place + 1] == "r" else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


SHOWN = 6
"""Largest number of layouts in a table."""


def plan_text(plan: SearchResult) -> str:
    """The best layout by part, the Pareto front, why neighbours lost, and the guessed inputs."""
    best, cluster = plan.best, plan.problem.cluster
    sizes, work = plan.problem.sizes, plan.problem.work
    tokens = plan.problem.batch * work.seq_len
    lines = [
        (
            f"{plan.model.name}: {sizes.num_parameters:,} parameters, {sizes.active_parameters / 1e9:,.2f} billion for "
            "a token"
        ),
        (
            f"{cluster.name}: {cluster.num_gpus} devices, {cluster.node_size} to a node, {cluster.device.memory_gib:g} "
            "GiB each"
        ),
        f"a step: {tokens:,} tokens, {plan.problem.batch:,} sequences of {work.seq_len:,}",
        "",
        f"best for {plan.goal}: {layout_text(best)}",
        *("  " + line for line in _totals(plan)),
        "",
        *side_by_side(_memory_lines(best.memory), _time_lines(best.seconds)),
    ]
    if plan.command:
        lines += ["", f"  {plan.command}"]
    lines += _as_configured(plan)
    others = plan.front
    if len(others) > 1:
        lines += ["", "less memory takes longer:"]
        lines += ["  " + line for line in columns(_front_rows(others[:SHOWN]), right="lrrr")]
    lines += ["", "one choice changed:"]
    lines += [f"  {line}" for line in why_not(best)]
    lines += ["", "guessed:"]
    lines += [f"  {guess}" for guess in plan.guesses]
    return "\n".join(lines)


def _as_configured(plan: SearchResult) -> list[str]:
    """Lines with the costs of the recipe or run as configured; empty if its layout is the best."""
    config, best = plan.model.config, plan.best
    if not isinstance(config, GPTRunConfig):
        return []
    own = as_configured(config, plan.problem)
    if own is None or own.layout == best.layout:
        return []
    memory = f"{own.memory.device_bytes / GIB:,.1f} GiB"
    fits = memory if own.fits else f"{memory}, which does not fit"
    return ["", f"as configured: {layout_text(own)}: {seconds_text(own.seconds.total_s)}, {fits}"]


def how_sure() -> str:
    """Sentence on the error bar of times."""
    fast, slow = ERROR_BAR
    return (
        f"In three of four published runs of sources that nothing was fitted to, the measured time is {fast:g} to "
        f"{slow:g}"
        " times the predicted one; docs/planner.md names the runs, and python -m benchmarks.planner in a clone "
        "compares each."
    )


def layout_text(candidate: Candidate) -> str:
    """A layout in a few words."""
    layout = candidate.layout
    words = [f"zero {layout.zero_stage}"]
    if layout.pp_degree > 1:
        words.append(f"pp {layout.pp_degree}x{layout.virtual_stages}")
    if layout.tp_degree > 1:
        words.append(f"tp {layout.tp_degree}")
    if any(block.num_experts for block in candidate.problem.sizes.blocks):
        words.append(f"route {layout.route_degree}")
    slices = {layout.slices_of(block.num_experts) for block in candidate.problem.sizes.blocks if block.num_experts}
    if max(slices, default=1) > 1:
        words.append(f"{max(slices)} slices")
    if layout.dp_replicate_degree > 1:
        words.append(f"{layout.dp_replicate_degree} copies")
    if layout.route_degree > candidate.problem.cluster.node_size:
        words.append(layout.all_to_all)
    if layout.overlap_degree > 1:
        words.append(f"overlap {layout.overlap_degree}")
    words += {
        "none": [],
        "experts": ["recompute h"],
        "moe": ["recompute moe"],
        "full": ["checkpointing"],
    }[layout.checkpointing]
    words += ["offload"] if layout.offload else []
    words.append(f"{layout.micro_batch} x {layout.accumulation} sequences")
    return ", ".join(words)


def _totals(plan: SearchResult) -> list[str]:
    best, fast, slow = plan.best, *ERROR_BAR
    rate, step = best.tokens_per_s, best.seconds.total_s
    unit, each = ("days", 86400) if plan.train_s > 2 * 86400 else ("hours", 3600)
    length = plan.train_s / each
    of_length = f"{length:,.4g} {unit} ({length * fast:,.3g} to {length * slow:,.3g})"
    lines = [
        (
            f"tokens/s     {rate:,.0f} ({rate / slow:,.0f} to {rate / fast:,.0f}), "
            f"{rate / plan.problem.cluster.num_gpus:,.0f} per device"
        ),
        f"step         {seconds_text(step)} ({seconds_text(step * fast)} to {seconds_text(step * slow)})",
        f"utilisation  {100 * best.utilisation:.1f} % of the peak",
        f"training     {plan.model.train_tokens:,.4g} tokens: {of_length}, {plan.gpu_hours:,.4g} device hours",
    ]
    if plan.usd:
        low, high = plan.usd[0] * fast, plan.usd[-1] * slow
        lines.append(f"price        {usd(low)} to {usd(high)} USD, at prices of 2026")
    if not plan.flags:
        lines.append("flags        none: this project has no pipeline and no such software")
    elif not plan.model.words:
        lines.append("flags        " + " ".join(plan.flags))
    lines.append(f"memory       {_filling(best)} (peaks of published runs: {_memory_bar(best)})")
    if plan.best.filled > SAFE:
        lines.append(f"             above {100 * SAFE:.0f} %: {_safer(plan)}")
    return lines


def _filling(one: Candidate) -> str:
    has, host = one.problem.cluster.device.memory_gib, one.problem.cluster.host.memory_gib
    needs = one.memory.device_bytes / GIB
    said = f"{needs:,.1f} of {has:g} GiB, {100 * needs / has:.0f} %"
    if not one.memory.host_bytes:
        return said
    offloaded = one.memory.host_bytes / GIB
    return f"{said}; of the host {offloaded:,.1f} of {host:g} GiB, {100 * offloaded / host:.0f} %"


def _memory_bar(one: Candidate) -> str:
    low, high = (factor * one.memory.device_bytes / GIB for factor in MEMORY_BAR)
    return f"{low:,.1f} to {high:,.1f} GiB"


def _safer(plan: SearchResult) -> str:
    other = plan.safer
    if other is None:
        return "no layout leaves more free; use more devices or shorter sequences"
    slower = other.seconds.total_s / plan.best.seconds.total_s - 1
    return f"safer is {layout_text(other)}: {_filling(other)}, {100 * slower:.0f} % slower"


def usd(value: float) -> str:
    """A price in words."""
    return (
        f"{value:,.0f}"
        if value < 1e4
        else f"{value / 1e3:,.0f} thousand"
        if value < 1e6
        else f"{value / 1e6:,.2f} million"
    )


def seconds_text(value: float) -> str:
    """Seconds, or milliseconds below one, with the unit."""
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"


def time_parts(seconds: StepSeconds) -> list[tuple[str, float]]:
    """Parts of a step in seconds, without zeros."""
    found = [(words_of(f.name), getattr(seconds, f.name)) for f in fields(seconds)]
    return [(words, value) for words, value in found if value]


def _memory_lines(memory: PeakMemory) -> list[tuple[str, str]]:
    rows = [(words, f"{size / GIB:,.2f}") for words, size in memory.parts]
    return [("memory, GiB", ""), *rows, ("in all", f"{memory.device_bytes / GIB:,.2f}")]


def _time_lines(seconds: StepSeconds) -> list[tuple[str, str]]:
    rows = [(words, f"{1e3 * value:,.1f}") for words, value in time_parts(seconds)]
    return [("time, ms", ""), *rows, ("in all", f"{1e3 * seconds.total_s:,.1f}")]


def side_by_side(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> list[str]:
    """Two tables of two columns as lines."""
    number = max(len(left), len(right))
    empty = [("", "")]
    rows = zip(left + empty * (number - len(left)), right + empty * (number - len(right)), strict=True)
    return columns([(*a, "   ", *b) for a, b in rows], right="lrllr")


def _front_rows(candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("layout", "GiB", "step", "tokens/s")]
    return rows + [
        (
            layout_text(c),
            f"{c.memory.device_bytes / GIB:,.1f}",
            seconds_text(c.seconds.total_s),
            f"{c.tokens_per_s:,.0f}",
        )
        for c in candidates
    ]
