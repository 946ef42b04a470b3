"""What runs make of the conversations and tasks that are held out, as JSON.

    python examples/chat/evaluate.py HELDOUT.jsonl MEASURED.json NAME=RUN ...

All are asked in the format of the last one, with the same tokens: a model of text has none of its own. For each run:
the loss of the right answers to conversations and to tasks, in nats per token; how often the right answer is likelier,
per token, than a worse one; how often the most likely answer to a task is the right one, and how often one that is
drawn; and some of the answers.
"""

import json
import signal
import sys
from pathlib import Path

import expertmesh as em

MOST_TOKENS, DRAWN = 24, 4
SHOWN = 6


def scored(engine: em.Engine, form: em.Engine, records: list[dict], field: str) -> list[tuple[float, int]]:
    """Log-probability and number of tokens of the answer in a field, with the token that ends it."""
    asked = [form.chat_ids(one["messages"]) for one in records]
    whole = [
        form.chat_ids(
            [*one["messages"], {"role": "assistant", "content": one[field]}],
            add_generation_prompt=False,
        )
        for one in records
    ]
    outputs = engine.generate(whole, em.SamplingParams(max_tokens=1, prompt_logprobs=0))
    answers = [
        [token.logprob for token in output.prompt_logprobs[len(ids) :]]
        for output, ids in zip(outputs, asked, strict=True)
    ]
    return [(sum(answer), len(answer)) for answer in answers]


def measured(run: str, form: em.Engine, records: list[dict]) -> dict:
    """Measures of a run, asked in the format of another one."""
    engine = em.Engine(run)
    is_task = [one["is_task"] for one in records]
    right, worse = (scored(engine, form, records, field) for field in ("answer", "worse"))
    better = [one[0] / one[1] > other[0] / other[1] for one, other in zip(right, worse, strict=True)]
    asked = [form.chat_ids(one["messages"]) for one in records]
    greedy = em.SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    said = [output.text.strip() for output in engine.generate(asked, greedy)]
    found: dict[str, dict] = {}
    for name, kind in (("chats", False), ("tasks", True)):
        rows = [row for row, one in enumerate(is_task) if one == kind]
        found[name] = {
            "number": len(rows),
            "loss": -sum(right[row][0] for row in rows) / sum(right[row][1] for row in rows),
            "better": sum(better[row] for row in rows) / len(rows),
            "right": sum(said[row] == records[row]["answer"] for row in rows) / len(rows),
            "answers": [
                [records[row]["messages"][-1]["content"], said[row], records[row]["answer"]] for row in rows[:SHOWN]
            ],
        }
    tasks = [row for row in range(len(records)) if is_task[row] for _ in range(DRAWN)]
    chance = [em.SamplingParams(max_tokens=MOST_TOKENS, seed=seed) for seed in range(len(tasks))]
    outputs = engine.generate([asked[row] for row in tasks], chance)
    hits = [output.text.strip() == records[row]["answer"] for output, row in zip(outputs, tasks, strict=True)]
    found["tasks"]["drawn"] = sum(hits) / len(hits)
    return found


def main(heldout: str, target: str, *runs: str) -> None:
    """Measure all runs and write the file."""
    records = [json.loads(line) for line in Path(heldout).read_text().splitlines()]
    folders = dict(one.split("=", 1) for one in runs)
    form = em.Engine([*folders.values()][-1])
    found = {name: measured(run, form, records) for name, run in folders.items()}
    Path(target).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(*sys.argv[1:])
