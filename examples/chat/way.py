"""The whole way once: text, conversations, preferences, a reward, measures, 8 bits. `make chat` runs this.

    python examples/chat/way.py [FOLDER] [--base RUN] [--seed N] [--tiny]

Every stage is a command that is printed and can be run by hand. A stage that is done is not repeated, and one that was
stopped goes on where it was: start the program again. FOLDER (runs/chat) gets the runs, `measured.json`, `report.md`
and `report.html`. RUN (runs/demo) is the model of text, that of `make demo`, which is trained where there is none.
--tiny: a few steps on a few lines, for a look.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from report import report

STAGES = {
    "data": "python {here}/prepare.py {data} {seed} {data_size}",
    "text": "expertmesh train {text} --train.run-dir {base} --train.resume auto",
    "talk": "expertmesh train {base} --data.path {data}/chats.jsonl --data.pack --optim.lr 1e-3 {talk} "
    "--train.seed {seed} --train.run-dir {folder}/talk --train.resume auto",
    "preferred": "expertmesh train {folder}/talk --objective.name dpo --data.path {data}/pairs.jsonl --optim.lr 1e-4 "
    "--objective.sft-weight 0.2 {preferred} --train.seed {seed} --train.run-dir {folder}/preferred --train.resume auto",
    "rewarded": "expertmesh train {folder}/preferred --objective.name grpo --data.path {data}/prompts.jsonl "
    "--reward.functions {here}/rewards.py:placed,{here}/rewards.py:right:0 --rl.max-tokens 6 --optim.lr 2e-4 "
    "{rewarded} "
    "--train.seed {seed} --train.run-dir {folder}/rewarded --train.resume auto",
    "int8": "expertmesh quantize {folder}/rewarded --to {folder}/int8 --format int8",
    "measures": "python {here}/evaluate.py {data}/heldout.jsonl {folder}/measured.json "
    "text={base} talk={folder}/talk preferred={folder}/preferred rewarded={folder}/rewarded int8={folder}/int8",
    "page": "expertmesh report {base} {folder}/talk {folder}/preferred {folder}/rewarded --page {folder}/report.html",
}
"""Commands of the stages, in their order."""
SIZES = {
    "full": {
        "data_size": "",
        "text": "gpt-moe-demo",
        "talk": "--train.epochs 8 --train.eval-every 40",
        "preferred": "--train.epochs 1 --train.batch-size 16 --train.eval-every 10 --data.validation-fraction 0.15",
        "rewarded": "--train.steps 40 --train.batch-size 32 --train.eval-every 20 --data.validation-fraction 0.2",
    },
    "tiny": {
        "data_size": "--sample",
        "text": "gpt-moe-test --model.max-seq-len 128 --data.path {data}/text.txt --train.steps 2 "
        "--optim.warmup-steps 1 --train.device cpu",
        "talk": "--train.steps 2 --train.batch-size 4 --data.validation-fraction 0.3",
        "preferred": "--train.steps 2 --train.batch-size 4 --data.validation-fraction 0.3",
        "rewarded": "--train.steps 1 --train.batch-size 2 --rl.group 2 --train.eval-batches 1 "
        "--data.validation-fraction 0.3",
    },
}
"""What stages have of their own in each size."""


def parsed() -> argparse.Namespace:
    """Words of the command line."""
    parser = argparse.ArgumentParser(
        prog="way.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="runs/chat", metavar="FOLDER")
    parser.add_argument("--base", default="runs/demo", metavar="RUN")
    parser.add_argument("--seed", default=0, type=int, metavar="N")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def commands(given: argparse.Namespace) -> dict[str, list[str]]:
    """Words of the command of each stage."""
    here = os.path.relpath(Path(__file__).parent)
    places = {"here": here, "folder": given.folder, "base": given.base, "seed": given.seed}
    places["data"] = f"{given.folder}/data"
    places = {name: shlex.quote(str(place)) for name, place in places.items()}
    own = SIZES["tiny" if given.tiny else "full"]
    own = {name: words.format(**places) for name, words in own.items()}
    return {name: shlex.split(words.format(**places, **own)) for name, words in STAGES.items()}


def run(words: list[str]) -> int:
    """Exit code of a command, which alone is stopped by Ctrl-C and ends as it does by itself."""
    starts = {"python": [sys.executable], "expertmesh": [sys.executable, "-m", "expertmesh"]}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    process = subprocess.Popen([*starts[words[0]], *words[1:]])
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


def clocks() -> dict[str, float]:
    """Seconds that have passed, and seconds of the processor that commands took."""
    times = os.times()
    return {"seconds": times.elapsed, "cpu_seconds": times.children_user + times.children_system}


def main() -> int:
    """Run what is not done yet, and write the report; returns the exit code."""
    given = parsed()
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "stages.json"
    stages = json.loads(record.read_text()) if record.exists() else {}
    for name, words in commands(given).items():
        line, known = shlex.join(words), stages.get(name, {})
        if known.get("done") == line:
            print(f"done: {line}", flush=True)
            continue
        print(f"\n$ {line}", flush=True)
        begin = clocks()
        code = run(words)
        spent = {key: known.get(key, 0.0) + now - begin[key] for key, now in clocks().items()}
        stages[name] = {"done": line if code == 0 else "", **spent}
        record.write_text(json.dumps(stages, indent=1) + "\n")
        if code:
            print(f"stopped in {name}; started again, it goes on there", file=sys.stderr)
            return code
    text = report(folder, Path(given.base), stages)
    (folder / "report.md").write_text(text)
    print(f"\n{text}\n{folder}/report.md has this, {folder}/report.html the curves.")
    print(f"Talk to it: expertmesh serve {folder}/int8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
