"""Tables of the planner as plain text."""

from collections.abc import Sequence
from dataclasses import fields

from expertmesh.costs.memory import GIB, PeakMemory
from expertmesh.costs.step_time import StepSeconds
from expertmesh.planner.configured import as_configured
from expertmesh.planner.search import Candidate
from expertmesh.planner.search_result import ERROR_BAR, SearchResult
from expertmesh.planner.serve import ServePlan, Serving
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


_SERVE_WORDS = {
    "weights_s": "weights",
    "cache_s": "keys and values",
    "products_s": "products",
    "exchange_s": "exchange",
    "tensor_s": "tensor parallelism",
    "host_s": "launches",
}
SHOWN = 6
"""Largest number of layouts in a table."""


def plan_text(plan: SearchResult) -> str:
    """The best layout by part, the Pareto front, why neighbours lost, and the guessed inputs."""
    best, cluster = plan.best, plan.problem.cluster
    sizes, work = plan.problem.sizes, plan.problem.work
    tokens = plan.problem.batch * work.seq_len
    lines = [
        f"{plan.model.name}: {sizes.num_parameters:,} parameters, {sizes.active_parameters / 1e9:,.2f} billion for a token",
        f"{cluster.name}: {cluster.num_gpus} devices, {cluster.node_size} to a node, {cluster.device.memory_gib:g} GiB each",
        f"a step: {tokens:,} tokens, {plan.problem.batch:,} sequences of {work.seq_len:,}",
        "",
        f"best for {plan.goal}: {layout_text(best)}",
        *("  " + line for line in _totals(plan)),
        "",
        *_side_by_side(_memory_lines(best.memory), _time_lines(best.seconds)),
    ]
    if plan.flags and plan.model.words:
        lines += ["", f"  {_command(plan)}"]
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


def _command(plan: SearchResult) -> str:
    """Command that starts the best layout on each node."""
    cluster = plan.problem.cluster
    launch = f"torchrun --nnodes={cluster.num_nodes} --nproc-per-node={cluster.node_size}"
    return " ".join([launch, "-m expertmesh train", plan.model.words, *plan.flags])


def _as_configured(plan: SearchResult) -> list[str]:
    """Lines with the costs of the recipe or run as configured; empty if its layout is the best."""
    config, best = plan.model.config, plan.best
    own = None if config is None else as_configured(config, plan.problem)
    if own is None or own.layout == best.layout:
        return []
    memory = f"{own.memory.device_bytes / GIB:,.1f} GiB"
    fits = memory if own.fits else f"{memory}, which does not fit"
    return ["", f"as configured: {layout_text(own)}: {_seconds(own.seconds.total_s)}, {fits}"]


def how_sure() -> str:
    """Sentence on the error bar of times."""
    fast, slow = ERROR_BAR
    return (
        f"In four of five published runs that nothing was fitted to, the measured time is {fast:g} to {slow:g} times the"
        " predicted one; docs/planner.md names the runs, and python -m benchmarks.planner in a clone compares each."
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
    slices = {
        layout.slices_of(block.num_experts)
        for block in candidate.problem.sizes.blocks
        if block.num_experts
    }
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
    rate, step, days = best.tokens_per_s, best.seconds.total_s, plan.train_s / 86400
    of_days = f"{days:,.4g} days ({days * fast:,.3g} to {days * slow:,.3g})"
    lines = [
        f"tokens/s     {rate:,.0f} ({rate / slow:,.0f} to {rate / fast:,.0f}), {rate / plan.problem.cluster.num_gpus:,.0f} per device",
        f"step         {_seconds(step)} ({_seconds(step * fast)} to {_seconds(step * slow)})",
        f"utilisation  {100 * best.utilisation:.1f} % of the peak",
        f"training     {plan.model.train_tokens:,.4g} tokens: {of_days}, {plan.gpu_hours:,.0f} device hours",
    ]
    if plan.usd:
        low, high = plan.usd[0] * fast, plan.usd[-1] * slow
        lines.append(f"price        {_usd(low)} to {_usd(high)} USD, at prices of 2026")
    if not plan.flags:
        lines.append(
            "flags        none: this project has no pipeline and no other optimizer states"
        )
    elif not plan.model.words:
        lines.append("flags        " + " ".join(plan.flags))
    if best.memory.host_bytes:
        lines.append(f"host         {best.memory.host_bytes / GIB:,.1f} GiB per device")
    return lines


def _usd(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value < 1e4
        else f"{value / 1e3:,.0f} thousand"
        if value < 1e6
        else f"{value / 1e6:,.2f} million"
    )


def _seconds(value: float) -> str:
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


def _side_by_side(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> list[str]:
    number = max(len(left), len(right))
    empty = [("", "")]
    rows = zip(
        left + empty * (number - len(left)), right + empty * (number - len(right)), strict=True
    )
    return columns([(*a, "   ", *b) for a, b in rows], right="lrllr")


def _front_rows(candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("layout", "GiB", "step", "tokens/s")]
    return rows + [
        (
            layout_text(c),
            f"{c.memory.device_bytes / GIB:,.1f}",
            _seconds(c.seconds.total_s),
            f"{c.tokens_per_s:,.0f}",
        )
        for c in candidates
    ]


def serve_text(plan: ServePlan) -> str:
    """The fastest layout for generation by part, and the next ones."""
    best, model = plan.best, plan.model
    cluster, seconds = best.cluster, best.seconds
    touched = ", ".join(
        f"{best.experts_touched(block):.1f} of {block.num_experts / best.route_degree:g}"
        for block in best.sizes.blocks
        if block.num_experts
    )
    lines = [
        f"{model.name}: {best.sizes.num_parameters:,} parameters, {best.sizes.active_parameters / 1e9:,.2f} billion for a token",
        f"{cluster.name}: {cluster.num_gpus} devices, {cluster.node_size} to a node, {cluster.device.memory_gib:g} GiB each",
        f"{best.batch:,} sequences at once, {best.context:,} tokens each",
        "",
        f"fastest: {serving_text(best)}",
        f"  per token    {_seconds(seconds.total_s)}, {1 / seconds.total_s:,.0f} tokens/s for a sequence",
        f"  throughput   {best.tokens_per_s:,.0f} tokens/s, {best.tokens_per_s / cluster.num_gpus:,.0f} per device",
    ]
    if best.usd_per_million:
        low, high = best.usd_per_million[0], best.usd_per_million[-1]
        lines.append(
            f"  price        {low:,.2f} to {high:,.2f} USD per million tokens, at prices of 2026"
        )
    if touched:
        lines.append(f"  experts      {touched} of a device are read in a layer's step")
    left = [
        ("memory, GiB", ""),
        ("weights", f"{best.weights_held_bytes / GIB:,.2f}"),
        ("keys and values", f"{best.cache_held_bytes / GIB:,.2f}"),
        ("in all", f"{best.device_bytes / GIB:,.2f}"),
    ]
    right = [("time, ms", "")]
    right += [
        (words, f"{1e3 * getattr(seconds, name):,.2f}")
        for name, words in _SERVE_WORDS.items()
        if getattr(seconds, name)
    ]
    right.append(("in all", f"{1e3 * seconds.total_s:,.2f}"))
    lines += ["", *_side_by_side(left, right)]
    rows: list[tuple[str, ...]] = [("way", "GiB", "per token", "tokens/s")]
    rows += [
        (
            serving_text(way),
            f"{way.device_bytes / GIB:,.1f}",
            _seconds(way.seconds.total_s),
            f"{way.tokens_per_s:,.0f}",
        )
        for way in plan.ways[:SHOWN]
    ]
    lines += ["", "ways:", *("  " + line for line in columns(rows, right="lrrr"))]
    return "\n".join([*lines, "", "guessed:", *(f"  {guess}" for guess in plan.guesses)])


def serving_text(way: Serving) -> str:
    """A layout for generation in a few words."""
    copies = way.cluster.num_gpus // way.route_degree
    words = [f"tp {way.tp_degree}", f"experts over {way.route_degree}"]
    return ", ".join([*words, f"{copies} copies"] if copies > 1 else words)
