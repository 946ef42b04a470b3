"""The plot of the race: bars of TFLOP/s per shape and contender, as SVG. No torch."""

from benchmarks.race.shapes import SHAPES
from benchmarks.race.verdicts import Record, goal_of, speed_of

COLORS = ("#0b6e99", "#c4632c", "#6b8e23", "#8a5aa5", "#b8860b", "#777777", "#a83254")


def svg(record: Record, phase: str = "both", width: int = 900) -> str:
    """Bars of TFLOP/s per shape and contender, with the goals as ticks."""
    shapes = [s for s in SHAPES if record["layers"].get(s.name, {}).get("rows")]
    names = list(dict.fromkeys(r["contender"] for s in shapes for r in record["layers"][s.name]["rows"]))
    speeds = {s.name: {n: speed_of(record, s, n, phase) for n in names} for s in shapes}
    goals = {s.name: goal_of(record, s, phase) or 0.0 for s in shapes}
    most = max([v or 0.0 for by in speeds.values() for v in by.values()] + list(goals.values()))
    left, bar, gap, top = 150, 14, 16, 30 + 18 * ((len(names) + 2) // 3)
    parts, y = [], float(top)

    def x_of(value: float) -> float:
        return left + (width - left - 70) * value / most

    for i, name in enumerate(names):
        x, line = 10 + 290 * (i % 3), 20 + 18 * (i // 3)
        parts.append(
            f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>'
            f'<text x="{x + 18}" y="{line}">{name}</text>'
        )
    for shape in shapes:
        start = y
        for i, name in enumerate(names):
            value = speeds[shape.name][name]
            if value is not None:
                parts.append(
                    f'<rect x="{left}" y="{y:.0f}" width="{x_of(value) - left:.1f}" height="{bar - 2}" '
                    f'fill="{COLORS[i % len(COLORS)]}"/><text x="{x_of(value) + 4:.1f}" '
                    f'y="{y + 10:.0f}">{value:.0f}</text>'
                )
                y += bar
        parts.append(f'<text x="{left - 8}" y="{(start + y) / 2 + 4:.0f}" text-anchor="end">{shape.name}</text>')
        if goals[shape.name]:
            x = x_of(goals[shape.name])
            parts.append(
                f'<line x1="{x:.1f}" y1="{start - 2:.0f}" x2="{x:.1f}" y2="{y:.0f}" stroke="black" '
                'stroke-dasharray="3"/>'
            )
        y += gap
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 30:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{y + 30:.0f}" fill="white"/>'
    )
    foot = (
        f'<text x="{width / 2:.0f}" y="{y + 18:.0f}" text-anchor="middle">'
        f"TFLOP/s, {'forward + backward' if phase == 'both' else phase}; dashed: goal</text></svg>"
    )
    return "\n".join([head, *parts, foot, ""])
