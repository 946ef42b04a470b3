"""Curves of losses as SVG, for the pages of results."""

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#0b6e99", "#c4632c", "#5a8f29", "#8b5fb0", "#b08d00", "#7a7a7a")
"""By arm, in the order in which arms are named."""

Curve = Sequence[tuple[float, float]]
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 20, 50


def plot(
    curves: Mapping[str, Sequence[Curve]],
    *,
    x_label: str,
    y_label: str,
    is_log: bool = False,
    width: int = 720,
    height: int = 420,
) -> str:
    """Lines of points, those of one name in one colour, as the text of an SVG.

    Args:
        curves: one or more lines for each name, each a sequence of (x, y).
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        is_log: x in octaves, with a mark at each; otherwise from 0.
        width: of the picture, in pixels.
        height: likewise.
    """
    points = [point for lines in curves.values() for line in lines for point in line]
    x_of = math.log2 if is_log else float
    last = max(x for x, _ in points)
    first = min(x for x, _ in points) if is_log else 0.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (high - low) or 0.05
    low, high = low - margin, high + margin
    span = x_of(last) - x_of(first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        u = LEFT + (width - LEFT - RIGHT) * (x_of(x) - x_of(first)) / span
        return u, TOP + (height - TOP - BOTTOM) * (high - y) / (high - low)

    marks = [first * 2**i for i in range(int(span) + 1)] if is_log else [last * i / 5 for i in range(6)]
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(6):
        y = low + (high - low) * i / 5
        u, v = place(last, y)
        parts.append(f'<line x1="{LEFT}" y1="{v:.1f}" x2="{u:.1f}" y2="{v:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{v + 4:.1f}" text-anchor="end">{y:.2f}</text>')
    for x in marks:
        u, v = place(x, low)
        parts.append(f'<text x="{u:.1f}" y="{v + 18:.1f}" text-anchor="middle">{_short(x)}</text>')
    for i, (name, lines) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        for line in lines:
            places = [place(x, y) for x, y in line]
            path = " ".join(f"{u:.1f},{v:.1f}" for u, v in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            if is_log:  # few points, each a run of its own
                parts += [f'<circle cx="{u:.1f}" cy="{v:.1f}" r="2.5" fill="{color}"/>' for u, v in places]
        y = TOP + 20 * (i + 1)
        parts.append(
            f'<line x1="{width - 190}" y1="{y - 4}" x2="{width - 165}" y2="{y - 4}" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{width - 158}" y="{y}">{escape(name)}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _short(x: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{x:.3g}"
