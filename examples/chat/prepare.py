"""Data of the example: conversations, pairs of answers, prompts with known answers, and what is held out.

    python examples/chat/prepare.py FOLDER [SEED] [--sample]

Conversations are those of the package chatterbot-corpus (BSD), tasks are sums that the package reasoning-gym (Apache-2.0) makes; with
--sample both are a few lines from here, and no package is needed. A question that is held out is in no other file.

    chats.jsonl     conversations to learn, and half of the tasks with their answers
    pairs.jsonl     the same questions, each with a better and a worse answer: that of another conversation, or a wrong number
    prompts.jsonl   the other half of the tasks, to be answered and rewarded
    heldout.jsonl   conversations and tasks that nothing is learned from, with a worse answer each
"""

import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

Message = dict[str, str]
MOST_CHARACTERS = 160
"""Length of a conversation: longer ones, most of them program code, do not fit into the model's 128 tokens."""
NUM_TASKS = 12_000
HELD_OUT_CHATS, HELD_OUT_TASKS = 0.15, 500
OFF = (-3, -2, -1, 1, 2, 3)
SAMPLE = (
    "Hello. | Hi, how can I help you? | What is a mixture? | A model with many experts.",
    "Who are you? | I am a small model.",
    "Good morning. | Good morning to you.",
    "What do you like? | I like sums.",
    "My computer is slow. | Close some programs.",
    "My screen is dark. | Check the cable.",
    "Tell me a joke. | I know none.",
    "Do you sleep? | I never sleep.",
)


def corpus() -> Iterator[list[str]]:
    """What is said in turn in each conversation of chatterbot-corpus, in English."""
    import chatterbot_corpus

    for path in sorted((Path(chatterbot_corpus.__file__).parent / "data/english").glob("*.yml")):
        for said in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            yield [" ".join(str(one).split()) for one in said]


def gym_tasks(seed: int) -> Iterator[tuple[str, str]]:
    """Sums of two and three digits with their answers, as reasoning-gym makes them."""
    import reasoning_gym

    sizes = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    for one in reasoning_gym.create_dataset("chain_sum", size=NUM_TASKS, seed=seed, **sizes):
        yield one["question"], one["answer"]


def sample_tasks() -> Iterator[tuple[str, str]]:
    for left in range(10):
        for right in range(4):
            yield f"What is {left} + {right}?", str(left + right)


def talk(said: list[str]) -> list[Message]:
    """Messages of the user and the assistant in turn, which end in an answer."""
    said = said[: len(said) // 2 * 2]
    return [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(said)]


def shuffled(found: list, seed: int) -> list:
    random.Random(seed).shuffle(found)
    return found


def worse(talks: list[list[Message]], others: list[str], seed: int) -> list[str]:
    """A worse answer for each conversation: a wrong number for a number, else one of two others or more."""
    generator = random.Random(seed)
    found = []
    for one in talks:
        right = one[-1]["content"]
        wrong = str(int(right) + generator.choice(OFF)) if is_number(right) else right
        while wrong == right:
            wrong = generator.choice(others)
        found.append(wrong)
    return found


def is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def write(path: Path, records: list[dict]) -> None:
    text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in records)
    path.write_text(text, encoding="utf-8")


def main(folder: Path, seed: int, *, is_sample: bool) -> None:
    """Write the files of FOLDER."""
    lines = [line.split(" | ") for line in SAMPLE] if is_sample else list(corpus())
    lines = [list(one) for one in dict.fromkeys(map(tuple, lines))]  # many are there several times
    talks = [talk(said) for said in lines if sum(map(len, said)) <= MOST_CHARACTERS]
    talks = [one for one in talks if one and all(message["content"] for message in one)]
    answers = sorted({one[-1]["content"] for one in talks})
    tasks = list(dict.fromkeys(sample_tasks() if is_sample else gym_tasks(seed)))
    tasks = [talk(list(one)) for one in shuffled(tasks, seed)]

    questions = shuffled(sorted({one[0]["content"] for one in talks}), seed)
    held = set(questions[: max(1, round(HELD_OUT_CHATS * len(questions)))])
    most = min(HELD_OUT_TASKS, len(tasks) // 5)
    held_out = [one for one in talks if one[0]["content"] in held] + tasks[:most]
    half = (len(tasks) - most) // 2
    learned = [one for one in talks if one[0]["content"] not in held] + tasks[most : most + half]

    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "chats.jsonl", [{"messages": one} for one in shuffled(learned, seed)])
    pairs = [
        {"prompt": one[:-1], "chosen": one[-1:], "rejected": [{**one[-1], "content": wrong}]}
        for one, wrong in zip(learned, worse(learned, answers, seed), strict=True)
    ]
    write(folder / "pairs.jsonl", pairs)
    prompts = [{"prompt": one[:-1], "answer": one[-1]["content"]} for one in tasks[most + half :]]
    write(folder / "prompts.jsonl", prompts)
    tried = [
        {
            "messages": one[:-1],
            "answer": one[-1]["content"],
            "worse": wrong,
            "is_task": one in tasks,
        }
        for one, wrong in zip(held_out, worse(held_out, answers, seed), strict=True)
    ]
    write(folder / "heldout.jsonl", tried)
    if is_sample:
        (folder / "text.txt").write_text(f"{Path(__file__).read_text()}\n" * 5, encoding="utf-8")
    print(
        f"{folder}: {len(learned):,} conversations, {len(pairs):,} pairs, {len(prompts):,} prompts, {len(tried):,} held out"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place, *more = (word for word in sys.argv[1:] if word != "--sample")
    try:
        main(Path(place), int((more or [0])[0]), is_sample="--sample" in sys.argv)
    except ImportError as error:
        fix = "pip install -c constraints.txt 'expertmesh[chat]'"
        sys.exit(f"error: {error.name} is not installed; install the extra chat: {fix}")
