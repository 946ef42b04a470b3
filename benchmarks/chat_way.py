"""Whether the stages of examples/chat/ learn, on three seeds; writes docs/results/chat.md.

    python -m benchmarks.chat_way FOLDER [SEED ...]

Each seed goes the way of `make chat` with other data and another order, on one thread; all begin with one model of
text. Started again, seeds go on where they stopped. The page has the seeds that are done.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from examples.chat.report import CURVES, ends_of, row

ROOT = Path(__file__).parents[1]
PAGE, NUMBERS = (ROOT / "docs" / "results" / f"chat.{ending}" for ending in ("md", "json"))
SEEDS = (0, 1, 2)
HEAD = """# A small mixture taught to answer

**Question.** Does each stage of `make chat` ([the page](../chat.md)) learn, on questions that no stage has seen?

**Protocol.** `gpt-moe-demo` after Python's standard library (3.6 million parameters, 2.6 million tokens), then conversations,
preferences and a reward, as `examples/chat/way.py` has them; the seed is that of tasks, of what is held out, and of the order. A
question is in one file only: what is held out, here and in the evaluations of each stage, no stage has seen. One thread, BF16 where
the processor has it. The row `text` is the model before any of it, asked in the same format. Settings were found on seed 0; the
others were run once.

* Loss: nats per token of the right answer.
* Better: how often the right answer is likelier, per token, than the same one broken off; half is chance. The model of text, which
  ends no answer, is likely to go on.
* Right: how often the most likely answer to a task, three digits to be sorted, is right.
* Drawn: how often an answer that is drawn at temperature 1, as in training, is right.

    python -m benchmarks.chat_way FOLDER

| seed | after | loss, chats | loss, tasks | better, chats | better, tasks | right, tasks | drawn, tasks |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501
TAIL = """
On {chats} conversations and {tasks} tasks that are held out. No claim about conversations is made: the model is far too small.
Seeds that are not done: {missing}.

Minutes are of the processor, of one core, evaluations and start included. The accuracy on pairs is that of the margin by which the
better answer has gained since the stage began: 0 before it, and half is chance.

| seed | stage | measure of its own evaluations | CPU minutes | steps | before | after |
|---|---|---|---|---|---|---|
"""  # noqa: E501
FORMS = {"minutes": ".1f", "steps": ",", "before": ".3f", "after": ".3f"}
OWN = {name: told for name, told in CURVES.items() if name != "text"}


def go(folder: Path, seed: int) -> dict:
    """Numbers of a seed, which is trained or goes on."""
    place = folder / f"seed-{seed}"
    words = [str(place), "--base", str(folder / "text"), "--seed", str(seed)]
    command = [sys.executable, str(ROOT / "examples/chat/way.py"), *words]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    stages = json.loads((place / "stages.json").read_text())
    own = {}
    for name, (_, measure) in OWN.items():
        before, after, steps = ends_of(place / name, measure)
        minutes = round(stages[name]["cpu_seconds"] / 60, 2)
        own[name] = {"minutes": minutes, "steps": steps, "before": before, "after": after}
    measured = json.loads((place / "measured.json").read_text())
    for kinds in measured.values():
        for one in kinds.values():
            del one["answers"]
    return {"measured": measured, "own": own}


def page(found: dict[str, dict]) -> str:
    """The page of the seeds that are done."""
    rows, own = [], []
    for seed, of_seed in found.items():
        for name, one in of_seed["measured"].items():
            rows.append(f"| {seed} | {name} | {row(one)} |\n")
        for name, one in of_seed["own"].items():
            numbers = (f"{one[key]:{form}}" for key, form in FORMS.items())
            own.append(f"| {seed} | {name} | {OWN[name][0]} | {' | '.join(numbers)} |\n")
    first = next(iter(found.values()))["measured"]["talk"]
    counts = {kind: f"{first[kind]['number']:,}" for kind in ("chats", "tasks")}
    counts["missing"] = ", ".join(str(seed) for seed in SEEDS if str(seed) not in found) or "none"
    return HEAD + "".join(rows) + TAIL.format(**counts) + "".join(own)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    found = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for seed in [int(word) for word in sys.argv[2:]] or SEEDS:
        found[str(seed)] = go(folder, seed)
        NUMBERS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        PAGE.write_text(page(dict(sorted(found.items()))))


if __name__ == "__main__":
    main()
