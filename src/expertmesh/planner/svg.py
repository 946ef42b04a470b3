"""Small pictures as SVG, in the colours of the report's page: scattered points, lines, and bars of parts."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 42
COLOURS = tuple(f"var(--run{n})" for n in range(6))
_MUTED = "var(--muted)"


@dataclass(frozen=True)
class Dot:
    """A point with a tooltip."""

    x: float  # value on the horizontal axis
    y: float  # value on the vertical axis
    tip: str = ""  # text of the tooltip
    colour: str = COLOURS[0]  # a CSS colour
    radius: float = 4.0  # radius in pixels


@dataclass(frozen=True)
class Axis:
    """An axis of a plot."""

    name: str  # name with unit
    low: float  # its first value
    high: float  # its last value
    is_log: bool = False  # whether it is logarithmic

    def place(self, value: float) -> float:
        """Position of a value on the axis, from 0 to 1."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.is_log else value

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            decades = [10.0**n * m for n in range(first, last + 1) for m in (1, 2, 5)]
            inside = [v for v in decades if self.low <= v <= self.high]
            return inside if len(inside) <= 8 else [v for v in inside if f"{v:e}"[0] == "1"]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4 or 1))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]

    @staticmethod
    def of(name: str, values: Sequence[float], *, is_log: bool = False, zero: bool = False) -> "Axis":
        """An axis around some values."""
        low, high = min(values), max(values)
        if is_log:
            return Axis(name, low / 1.25, high * 1.25, True)
        room = 0.06 * (high - low) or 1.0
        return Axis(name, 0.0 if zero else low - room, high + room)


def _short(value: float) -> str:
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{sign}"
    return f"{value:g}"


def plot(
    x: Axis,  # the horizontal axis
    y: Axis,  # the vertical axis
    dots: Sequence[Dot],  # the points
    *,
    lines: Sequence[tuple[Sequence[tuple[float, float]], str]] = (),  # each a sequence of (x, y), and its colour
    marks: Sequence[tuple[float, str]] = (),  # vertical lines, each with a text
    label: str,  # description of the picture for screen readers
) -> str:
    """Points and lines in a frame with axes."""

    def to_x(value: float) -> float:
        return _LEFT + x.place(value) * (WIDTH - _LEFT - _RIGHT)

    def to_y(value: float) -> float:
        return HEIGHT - _BOTTOM - y.place(value) * (HEIGHT - _TOP - _BOTTOM)

    parts = [*_frame(x, y, to_x, to_y)]
    for row, (value, text) in enumerate(marks):
        parts.append(
            f'<line x1="{to_x(value):.1f}" x2="{to_x(value):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" '
            f'stroke="{_MUTED}" stroke-dasharray="4 4"/>'
        )
        right = to_x(value) > WIDTH * 0.6
        anchor, shift = ("end", -5) if right else ("start", 5)
        parts.append(_text(to_x(value) + shift, HEIGHT - _BOTTOM - 10 - 16 * row, text, anchor))
    for places, colour in lines:
        path = " ".join(f"{to_x(a):.1f},{to_y(b):.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for dot in dots:
        tip = f"<title>{html.escape(dot.tip)}</title>"
        parts.append(
            f'<circle cx="{to_x(dot.x):.1f}" cy="{to_y(dot.y):.1f}" r="{dot.radius:g}" fill="{dot.colour}" '
            f'fill-opacity=".75">{tip}</circle>'
        )
    return _svg(parts, HEIGHT, label)


def _frame(x: Axis, y: Axis, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> list[str]:
    parts = []
    bottom = HEIGHT - _BOTTOM
    for value in x.ticks():
        parts.append(
            f'<line x1="{to_x(value):.1f}" x2="{to_x(value):.1f}" y1="{_TOP}" y2="{bottom}" stroke="var(--line)"/>'
        )
        parts.append(_text(to_x(value), bottom + 16, _short(value), "middle"))
    for value in y.ticks():
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{to_y(value):.1f}" y2="{to_y(value):.1f}" '
            'stroke="var(--line)"/>'
        )
        parts.append(_text(_LEFT - 6, to_y(value) + 4, _short(value), "end"))
    parts.append(_text((WIDTH + _LEFT) / 2, HEIGHT - 6, x.name, "middle"))
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle" font-size="12" '
        f'fill="{_MUTED}">{html.escape(y.name)}</text>'
    )
    return parts


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, unit: str, label: str) -> str:
    """A stacked bar for each row, and a legend."""
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts if value > 0))
    colour = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    opacity = {name: (1.0, 0.55, 0.3)[place // len(COLOURS) % 3] for place, name in enumerate(names)}
    most = max((sum(max(v, 0.0) for _, v in parts) for _, parts in rows), default=1.0)
    parts_, top = [], 6.0
    for title, parts in rows:
        parts_.append(_text(4, top + 12, title, "start", "var(--text)"))
        left = 4.0
        for name, value in parts:
            if value <= 0:
                continue
            width = value / most * (WIDTH - 90)
            tip = html.escape(f"{name}: {value:,.3g} {unit}")
            parts_.append(
                f'<rect x="{left:.1f}" y="{top + 18:.1f}" width="{max(width, 0.5):.1f}" height="18" '
                f'fill="{colour[name]}" fill-opacity="{opacity[name]}"><title>{tip}</title></rect>'
            )
            left += width
        whole = sum(max(value, 0.0) for _, value in parts)
        parts_.append(_text(left + 6, top + 32, f"{whole:,.3g} {unit}", "start"))
        top += 46
    left = 4.0
    for name in names:
        width = 22 + 6.6 * len(name)
        if left + width > WIDTH:
            left, top = 4.0, top + 20
        parts_.append(
            f'<rect x="{left:.0f}" y="{top + 4:.0f}" width="11" height="11" fill="{colour[name]}" '
            f'fill-opacity="{opacity[name]}"/>'
        )
        parts_.append(_text(left + 15, top + 14, name, "start"))
        left += width + 8
    return _svg(parts_, round(top + 26), label)


def _text(x: float, y: float, text: str, anchor: str, colour: str = _MUTED) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" '
        f'fill="{colour}">{html.escape(text)}</text>'
    )


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}" width="100%">'
        + "".join(parts)
        + "</svg>"
    )
