"""The report of the example: what each stage was, what it learned, and what the model answers."""

import json
from pathlib import Path

SAYS = {
    "text": "text alone",
    "talk": "conversations",
    "preferred": "preferences",
    "rewarded": "a reward",
    "int8": "experts in 8 bits",
}
"""What a stage learned from, or was made of."""
CURVES = {
    "text": ("loss of held-out text", "loss"),
    "talk": ("loss of held-out answers", "loss"),
    "preferred": ("accuracy on held-out pairs", "accuracy"),
    "rewarded": ("tasks right, greedy", "reward_right"),
}
"""Measure of each stage's own evaluations."""


MEASURES = """On {chats:,} conversations and {tasks:,} tasks that no stage has seen. Loss: nats per token of the right answer.
Better: how often the right answer is likelier, per token, than a worse one; half is chance. Right: how often the most likely answer to
a task is the right one. Drawn: how often one that is drawn at temperature 1 is."""  # noqa: E501


def ends_of(run: Path, measure: str) -> tuple[float, float, int]:
    """The first and the last value of a measure in the evaluations of a run, and its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line[f"eval_{measure}"] for line in lines if f"eval_{measure}" in line]
    return lines[0].get(f"initial_eval_{measure}", found[0]), found[-1], lines[-1]["step"]


def row(one: dict) -> str:
    """Cells of the measures of a model."""
    values = [one[kind][key] for key in ("loss", "better") for kind in ("chats", "tasks")]
    values += [one["tasks"]["right"], one["tasks"]["drawn"]]
    return " | ".join(f"{value:.3f}" for value in values)


def report(folder: Path, base: Path, stages: dict) -> str:
    """The page.

    Args:
        folder: folder with the runs and measured.json.
        base: run that learned text.
        stages: `seconds` and `cpu_seconds` of each stage.
    """
    lines = ["# From text to a model that answers", ""]
    lines += ["| stage | minutes | CPU minutes | steps | measure of its own | before | after |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, (what, measure) in CURVES.items():
        first, last, steps = ends_of(base if name == "text" else folder / name, measure)
        minutes = " | ".join(f"{stages[name][key] / 60:.1f}" for key in ("seconds", "cpu_seconds"))
        lines.append(f"| {name} | {minutes} | {steps:,} | {what} | {first:.3f} | {last:.3f} |")
    whole = sum(stage["seconds"] for stage in stages.values()) / 60
    lines += ["", f"All stages, measures and pages included: {whole:.1f} minutes.", ""]
    found = json.loads((folder / "measured.json").read_text())
    chats, tasks = (found["talk"][kind]["number"] for kind in ("chats", "tasks"))
    lines += [
        MEASURES.format(chats=chats, tasks=tasks),
        "",
        "| after | loss, chats | loss, tasks | better, chats | better, tasks | right, tasks | drawn, tasks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, said in SAYS.items():
        lines.append(f"| {said} | {row(found[name])} |")
    lines += ["", "What the model answers at the end, to questions that it has not seen:", ""]
    for kind in ("tasks", "chats"):
        for asked, said, right in found["int8"][kind]["answers"]:
            lines.append(f"* {asked} **{said}** (in the data: {right})")
    lines += ["", "It is a model of a few million numbers that has read Python: expect no more."]
    return "\n".join(lines) + "\n"
