"""A plan as a self-contained HTML page: memory against time, bars by part, scaling, and the error bar."""

import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from expertmesh.config.output_file import output_file, write_whole
from expertmesh.costs.memory import GIB
from expertmesh.planner.scaling import Scaled, crossovers, scaling
from expertmesh.planner.search_result import SearchResult
from expertmesh.planner.svg import COLOURS, Axis, Dot, bars, plot
from expertmesh.planner.table import how_sure, layout_text, plan_text, time_parts

BARS = 4
"""Number of layouts of the Pareto front that have bars."""


def write_page(plan: SearchResult, path: str | Path) -> Path:
    """Write a page about a plan."""
    target = output_file("page", path)
    write_whole(target, _filled(plan))
    return target


def _filled(plan: SearchResult) -> str:
    style = files("expertmesh.reporting").joinpath("page.css").read_text("utf-8")
    title = f"{plan.model.name} on {plan.problem.cluster.name}"
    found = scaling(plan.problem)
    sections = [
        ("What it costs", _text(plan_text(plan))),
        ("Memory against time", _front(plan)),
        ("By part", _parts(plan)),
        ("From 8 to 4,096 devices", _scaling(found)),
        ("How sure this is", f'<p class="note">{html.escape(how_sure())}</p>'),
    ]
    body = "".join(
        f'<section aria-labelledby="s{n}"><h2 id="s{n}">{html.escape(name)}</h2>{inner}</section>'
        for n, (name, inner) in enumerate(sections)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>Plan: {html.escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n'
        f"<body>\n<header><h1>{html.escape(title)}</h1></header>\n<main>{body}</main>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return (
        '<div class="text scroll" '
        f'style="line-height:1.45;white-space:pre;overflow-wrap:normal">{html.escape(text)}</div>'
    )


def _figure(picture: str, title: str, note: str = "") -> str:
    said = f"<span>{html.escape(note)}</span>" if note else ""
    return f'<figure class="wide"><figcaption>{html.escape(title)}{said}</figcaption>{picture}</figure>'


def _grid(*figures: str) -> str:
    columns = "repeat(auto-fit, minmax(min(100%, 460px), 1fr))"
    return f'<div style="display:grid;gap:14px;grid-template-columns:{columns}">{"".join(figures)}</div>'


def _front(plan: SearchResult) -> str:
    """Figure of all candidates, with the Pareto front."""
    dots = [
        Dot(
            c.memory.device_bytes / GIB,
            c.seconds.total_s,
            f"{layout_text(c)}\n{c.memory.device_bytes / GIB:.1f} GiB, {c.seconds.total_s:.3g} s",
            "var(--muted)",
            2.5,
        )
        for c in plan.candidates
    ]
    front = plan.front
    line = [(c.memory.device_bytes / GIB, c.seconds.total_s) for c in front]
    dots += [
        Dot(x, y, f"{layout_text(c)}\n{x:.1f} GiB, {y:.3g} s", COLOURS[0], 5)
        for c, (x, y) in zip(front, line, strict=True)
    ]
    picture = plot(
        Axis.of("GiB of a device", [d.x for d in dots]),
        Axis.of("seconds of a step", [d.y for d in dots], is_log=True),
        dots,
        lines=[(line, COLOURS[0])],
        label="Memory of a device against the time of a step, for every layout that fits",
    )
    return _figure(
        picture,
        "Every layout that fits",
        "Coloured: none has less of both. Point at one to read it.",
    )


def _parts(plan: SearchResult) -> str:
    shown = plan.front[:BARS]
    time = [(layout_text(c), [(n, 1e3 * v) for n, v in time_parts(c.seconds)]) for c in shown]
    memory = [(layout_text(c), [(words, size / GIB) for words, size in c.memory.parts]) for c in shown]
    return _grid(
        _figure(bars(time, unit="ms", label="Time of a step by part"), "Time of a step"),
        _figure(bars(memory, unit="GiB", label="Memory of a device by part"), "Memory of a device"),
    )


def _scaling(found: Sequence[Scaled]) -> str:
    fitting = [s for s in found if s.best is not None]
    if not fitting:
        return '<p class="note">Fits on no number of these devices from 8 to 4,096 with as many tokens for each.</p>'
    dots = [
        Dot(
            s.num_gpus,
            s.tokens_per_s,
            f"{s.num_gpus} devices: {s.tokens_per_s:,.0f} tokens/s each\n{layout_text(s.best)}",
            COLOURS[0],
        )
        for s in fitting
        if s.best is not None
    ]
    crossed = crossovers(list(found))
    marks = [(float(c.num_gpus), c.what) for c in crossed if c.num_gpus is not None]
    picture = plot(
        Axis("devices", 7, 4700, True),
        Axis.of("tokens/s of a device", [d.y for d in dots], zero=True),
        dots,
        lines=[([(d.x, d.y) for d in dots], COLOURS[0])],
        marks=marks,
        label="Tokens per second of a device from 8 to 4,096 devices",
    )
    never = [c.what for c in crossed if c.num_gpus is None]
    note = f" Nowhere here: {'; '.join(never)}." if never else ""
    rows = "".join(
        f'<tr><td class="number">{s.num_gpus:,}</td><td '
        f'class="number">{s.tokens_per_s:,.0f}</td><td>{html.escape("nothing fits" if s.best is None else layout_text(s.best))}</td></tr>'  # noqa: E501
        for s in found
    )
    table = (
        '<div class="scroll"><table><tr><th class="number">devices</th><th class="number">tokens/s '
        f"each</th><th>best layout</th></tr>{rows}</table></div>"
    )
    return (
        _figure(
            picture,
            "Tokens per second of a device",
            f"As many tokens per step for each device everywhere.{note}",
        )
        + table
    )
