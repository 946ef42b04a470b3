"""Sorting three digits by reinforcement learning, from the command line: data, a short fine-tune, then GRPO.

    python examples/rl_sorting.py FOLDER [updates 250] [seeds 0,1,2] [--option value of `train` ...]

The base is a tiny mixture that has seen the right answers to half of all triples for a short while. GRPO begins with it, on
other triples; those held out are in neither. A reward is the share of places with the right digit; an update is one step of
`expertmesh train`. Started again, runs go on where they stopped. FOLDER/results.json gets, for every seed, the curve of the
sampled reward, held-out greedy accuracies, and the largest difference between rollout and training.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

BASE_STEPS = 85
REWARDS = '''"""Rewards of sorted digits."""


def places(completions, answer, **kwargs):
    """The share of places with the right digit."""
    pairs = [(said.split(), right.split()) for said, right in zip(completions, answer)]
    return [sum(map(str.__eq__, *pair)) / max(map(len, pair)) for pair in pairs]


def sorted_right(completions, answer, **kwargs):
    """1 where all is right."""
    return [float(said == right) for said, right in zip(completions, answer)]
'''


def write_data(folder: Path) -> None:
    """Records of the fine-tune and, of other triples, of GRPO."""
    triples = list(itertools.product(range(10), repeat=3))
    random.Random(0).shuffle(triples)
    records = [
        {
            "prompt": " ".join(map(str, one)) + " =",
            "completion": "".join(f" {d}" for d in sorted(one)),
        }
        for one in triples
    ]
    prompts = [{"prompt": one["prompt"], "answer": one["completion"]} for one in records]
    for name, lines in (("answers", records[:500]), ("prompts", prompts[500:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "rewards.py").write_text(REWARDS)


def train(folder: Path, name: str, words: list[str]) -> list[dict[str, float]]:
    """Lines of metrics.jsonl of a run, which is trained or goes on."""
    common = "--data.completions text --train.no-tensorboard --train.device cpu --train.resume auto"
    places = ["--train.run-dir", str(folder / name), "--data.cache-dir", str(folder / "cache")]
    command = [sys.executable, "-m", "expertmesh", "train", *words, *common.split(), *places]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def base(folder: Path) -> None:
    """The short fine-tune."""
    options = f"""gpt-moe-test --model.vocab-size 300 --model.max-seq-len 16 --data.seq-len 16
        --train.steps {BASE_STEPS} --train.batch-size 64 --train.eval-every {BASE_STEPS} --data.path"""
    train(folder, "base", [*options.split(), str(folder / "answers.jsonl")])


def policy(folder: Path, name: str, updates: int, seed: int, more: list[str]) -> dict[str, object]:
    """Numbers of a run of GRPO."""
    given = f"""--objective.name grpo --rl.group 8 --rl.max-tokens 5 --train.batch-size 32 --train.steps {updates}
        --optim.lr 1e-3 --optim.beta2 0.95 --optim.schedule constant --optim.warmup-steps 10 --train.seed {seed}
        --data.validation-fraction 0.4 --train.eval-every 25 --train.eval-batches 100 --train.checkpoint-every 50
        --data.path {folder}/prompts.jsonl
        --reward.functions {folder}/rewards.py:places,{folder}/rewards.py:sorted_right:0"""
    words = [*given.split(), *more]
    options = dict(
        zip(words[::2], words[1::2], strict=True)
    )  # a later one takes an earlier one's place
    named = [word for pair in options.items() for word in pair]
    lines = train(folder, name, [str(folder / "base"), *named])
    accuracies = [
        (line["step"], line["eval_reward_sorted_right"]) for line in lines if "eval_loss" in line
    ]
    return {
        "seed": seed,
        "updates": lines[-1]["step"],
        "reward": [round(line["reward"], 4) for line in lines[:: max(1, updates // 25)]],
        "accuracy": [(0, lines[0]["initial_eval_reward_sorted_right"]), *accuracies],
        "mismatch_max": max(line["mismatch_max"] for line in lines),
    }


def main() -> None:
    """Train, and write the results."""
    given = [*sys.argv[1:], *[None] * 3]
    folder, updates = Path(given[0] or "runs/sorting").resolve(), int(given[1] or 250)
    seeds, more = (given[2] or "0,1,2").split(","), sys.argv[4:]
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    base(folder)
    results = []
    for seed in map(int, seeds):
        results.append(policy(folder, f"grpo-{seed}", updates, seed, more))
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        first, last = (results[-1]["accuracy"][place][1] for place in (0, -1))
        shown = f"accuracy {first:.3f} -> {last:.3f}, largest difference"
        print(f"seed {seed}: {shown} {results[-1]['mismatch_max']:g}", flush=True)


if __name__ == "__main__":
    main()
