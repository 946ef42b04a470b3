"""Curves of validation loss as SVG. No torch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Curve(NamedTuple):
    """One run: its kind, and points (x, loss)."""

    kind: str
    points: Sequence[Sequence[float]]


def svg(
    curves: Sequence[Curve],
    kinds: Mapping[str, tuple[str, str]],
    *,
    x_label: str = "tokens",
    unit: tuple[float, str] = (1e6, "M"),
    width: int = 720,
    height: int = 420,
) -> str:
    """Validation loss against x.

    Args:
        curves: of one kind or several.
        kinds: name and colour of each kind, in the legend's order.
        x_label: what x counts.
        unit: what x is divided by in labels, and its name there.
        width: in pixels.
        height: in pixels.
    """
    points = [point for curve in curves for point in curve.points]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (high - low) or 0.01
    low, high = low - margin, high + margin
    left, top, bottom = 60, 20, 50
    span = (last - first) or 1.0

    def place(x: float, y: float) -> str:
        u = left + (width - left - 20) * (x - first) / span
        v = top + (height - top - bottom) * (high - y) / (high - low)
        return f"{u:.1f},{v:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(6):
        y = low + (high - low) * i / 5
        u, v = place(first, y).split(",")
        parts.append(f'<line x1="{u}" y1="{v}" x2="{width - 20}" y2="{v}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(v) + 4}" text-anchor="end">{y:.2f}</text>')
        x = first + span * i / 5
        u, v = place(x, low).split(",")
        label = f"{x / unit[0]:.1f} {unit[1]}"
        parts.append(f'<text x="{u}" y="{float(v) + 18}" text-anchor="middle">{label}</text>')
    for curve in curves:
        line = " ".join(place(x, y) for x, y in curve.points)
        color = kinds[curve.kind][1]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    for i, (name, color) in enumerate(kinds.values()):
        y = top + 20 + 20 * i
        parts.append(
            f'<line x1="{width - 190}" y1="{y - 4}" x2="{width - 165}" y2="{y - 4}" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{width - 158}" y="{y}">{name}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">{x_label}</text>'
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">validation loss (nats per token)</text>'
    )
    return "\n".join([*parts, "</svg>", ""])
