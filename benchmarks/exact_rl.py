"""Exact reinforcement learning: rollouts against training in every update, and what is learned; writes
docs/results/rl.md.

    python -m benchmarks.exact_rl FOLDER [ARM ...]

Three digits are sorted. The base is a tiny mixture that has seen the right answers to half of all triples for a short
while; GRPO begins with it, on other triples, and those held out are in neither. A reward is the share of places with
the right digit; an update is one step of `expertmesh train`. Arms: all weights (`full`), adapters (`lora`), and both as
others compute, in BF16 without batch-invariant arithmetic, routers free and nothing corrected (`free`, `lora_free`).
Started again, runs go on where they stopped; the page is written when all arms are done.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, NUMBERS = (ROOT / "docs" / "results" / f"rl.{ending}" for ending in ("md", "json"))
ARMS = {
    "full": ("all weights", 250, "0,1,2", ""),
    "lora": (
        "adapters of rank 16",
        250,
        "0,1,2",
        "--adapter.kind lora --adapter.rank 16 --optim.lr 2e-3",
    ),
    "free": (
        "all weights, not exact, BF16",
        25,
        "0",
        "--rl.exact false --rl.replay-routing false --train.dtype bfloat16",
    ),
    "lora_free": (
        "adapters of rank 16, not exact, BF16",
        25,
        "0,1,2",
        (
            "--adapter.kind lora --adapter.rank 16 --optim.lr 2e-3 --rl.exact false --rl.replay-routing false "
            "--train.dtype bfloat16"
        ),
    ),
}
HEAD = """# Exact reinforcement learning

**Question.** Do rollouts and training compute the same bits over whole runs of GRPO, and is something learned meanwhile?

**Protocol.** A mixture of 2 layers, 4 experts and 151,104 parameters sorts three digits. It was fine-tuned for 85 steps on half of
the triples; GRPO begins there, with others. A reward is the share of places with the right digit; groups of 8, 32 prompts per
update. Learning rate 1e-3, as 3e-4 was slower over 100 updates; adapters 2e-3, as at 5e-3 with 16 prompts nothing rose in 100
updates. Accuracy: all three places right, greedy answers to 214 triples in neither training set. Every update compares the log-probability of every token in training with the one that drew it. CPU, one thread, FP32 if not said otherwise.

    python -m benchmarks.exact_rl FOLDER

| what learns | seed | updates | sampled reward, first and last | accuracy before and after | largest difference |
|---|---|---|---|---|---|
"""  # noqa: E501
TAIL = """
The rows "not exact" are how others compute: the same model, rounded in BF16, its experts chosen again in training and
nothing corrected. Their differences, in nats, are what importance weights correct elsewhere; the others have none to correct.
The arms were run with two versions of the kernels, so that their bases differ by rounding, and by 0.02 in accuracy.
"""  # noqa: E501


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
    options = dict(zip(words[::2], words[1::2], strict=True))  # a later one takes an earlier one's place
    named = [word for pair in options.items() for word in pair]
    lines = train(folder, name, [str(folder / "base"), *named])
    accuracies = [(line["step"], line["eval_reward_sorted_right"]) for line in lines if "eval_loss" in line]
    return {
        "seed": seed,
        "updates": lines[-1]["step"],
        "reward": [round(line["reward"], 4) for line in lines[:: max(1, updates // 25)]],
        "accuracy": [(0, lines[0]["initial_eval_reward_sorted_right"]), *accuracies],
        "mismatch_max": max(line["mismatch_max"] for line in lines),
    }


def run(folder: Path, updates: int, seeds: str, options: str) -> None:
    """Runs of an arm, whose numbers go to results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    base(folder)
    results = []
    for seed in map(int, seeds.split(",")):
        results.append(policy(folder, f"grpo-{seed}", updates, seed, options.split()))
        print(folder.name, json.dumps(results[-1]), flush=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1))


def row(what: str, run: dict) -> str:
    first, last = (run["accuracy"][place][1] for place in (0, -1))
    rewards = f"{run['reward'][0]:.3f}, {run['reward'][-1]:.3f}"
    cells = (what, run["seed"], run["updates"], rewards, f"{first:.3f}, {last:.3f}")
    return "| " + " | ".join(map(str, (*cells, f"{run['mismatch_max']:.2g}"))) + " |\n"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    places = {name: folder / name / "results.json" for name in ARMS}
    for name in sys.argv[2:] or ARMS:
        if not places[name].exists():
            _, *rest = ARMS[name]
            run(folder / name, *rest)
    if not all(place.exists() for place in places.values()):
        return
    found = {ARMS[name][0]: json.loads(place.read_text()) for name, place in places.items()}
    NUMBERS.write_text(json.dumps(found, indent=1) + "\n")
    rows = (row(what, run) for what, runs in found.items() for run in runs)
    PAGE.write_text(HEAD + "".join(rows) + TAIL)


if __name__ == "__main__":
    main()
