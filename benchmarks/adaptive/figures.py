"""The tuner's points as a table and as a plot."""

import math
from typing import Any

Point = dict[str, Any]
ALL = "adaptive"
WIDTH, ROW, LEFT = 760, 18, 260
WORST = 16.0
"""Slower than this times adaptive is drawn at the edge."""


def totals(points: list[Point]) -> dict[str, float]:
    """Seconds of each static plan over all points, of adaptive's; where one was given up, those of its only round."""
    names = [name for name in points[0]["seconds"] if name != ALL]
    adaptive = sum(p["seconds"][ALL] for p in points)
    return {name: sum(p["seconds"][name] for p in points) / adaptive for name in names}


def label(point: Point) -> str:
    """A point in a few words."""
    factor = point["capacity_factor"]
    drops = "dropless" if factor is None else f"capacity {factor:g}"
    return (
        f"{point['ranks']} ranks, {point['tokens']} tokens, {drops}, fullest {point['fullest']:g} x, "
        f"{point['rate'] or 'loopback'}"
    )


def table(points: list[Point]) -> str:
    """Markdown: a row for each point, one for the static plans in total."""
    lines = [
        "| point | adaptive, s | best static plan | its s | adaptive / best |",
        "| --- | --- | --- | --- | --- |",
    ]
    for point in points:
        static = {name: s for name, s in point["seconds"].items() if name != ALL}
        best = min(static, key=static.__getitem__)
        lines.append(
            f"| {label(point)} | {point['seconds'][ALL]:.3f} | {best} | {static[best]:.3f} | "
            f"{point['adaptive / best']:.2f} |"
        )
    lines += ["", "| static plan | its time over adaptive's, all points |", "| --- | --- |"]
    for name, ratio in totals(points).items():
        given_up = sum(name in point["hopeless"] for point in points)
        once = f" (given up after one round at {given_up} points)" if given_up else ""
        lines.append(f"| {name}{once} | {ratio:.2f} |")
    return "\n".join([*lines, ""])


def plot(points: list[Point]) -> str:
    """SVG: for each point every static plan by its time over adaptive's, in octaves."""

    def x_of(ratio: float) -> float:
        octaves = math.log2(min(max(ratio, 0.5), WORST)) + 1
        return LEFT + octaves / (math.log2(WORST) + 1) * (WIDTH - LEFT - 20)

    height = ROW * (len(points) + 3)
    head = f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="10"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {head}>']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for ratio in (0.5, 1, 2, 4, 8, WORST):
        x, color = x_of(ratio), "#c4632c" if ratio == 1 else "#dddddd"
        parts.append(f'<path d="M{x:.1f} {ROW} V{height - 2 * ROW}" stroke="{color}"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="{height - ROW}">{ratio:g}</text>')
    for n, point in enumerate(points):
        y = ROW * (n + 1.5)
        parts.append(f'<text x="4" y="{y + 3}">{label(point)}</text>')
        for name, seconds in point["seconds"].items():
            if name != ALL:
                ratio = seconds / point["seconds"][ALL]
                title = f"<title>{name}: {ratio:.2f}</title>"
                parts.append(
                    f'<circle cx="{x_of(ratio):.1f}" cy="{y}" r="3" fill="#0b6e99" fill-opacity="0.6">{title}</circle>'
                )
    parts.append(f'<text x="{LEFT}" y="{height - 4}">time of each static plan over that of adaptive</text></svg>')
    return "\n".join([*parts, ""])
