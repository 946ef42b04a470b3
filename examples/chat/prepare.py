"""Data of the example: conversations, pairs of answers, prompts with known answers, and what is held out.

    python examples/chat/prepare.py FOLDER [SEED] [--sample]

Conversations are those of the package chatterbot-corpus (BSD), tasks are lists of numbers to be sorted that the package
reasoning-gym (Apache-2.0) makes; with --sample both are a few lines from here, and no package is needed. A question is
in one file only, so that no stage is measured on what an earlier one has learned.

    chats.jsonl     conversations to learn, and tasks with their answers
    pairs.jsonl     questions with a better and a worse answer, which is the better one broken off half-way
    prompts.jsonl   tasks to be answered and rewarded
    heldout.jsonl   conversations and tasks that nothing is learned from, with a worse answer each
"""

import json
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

MOST_CHARACTERS = 160
"""Length of a conversation: longer ones, most of them program code, do not fit into the model's 128 tokens."""
NUM_TASKS = 4_000
FILES = ("chats", "pairs", "prompts", "heldout")
SHARES = ((0.5, 0.3, 0.0, 0.2), (0.35, 0.15, 0.35, 0.15))
"""Shares of the files, of conversations and of tasks."""
SAMPLE = (
    "Hello. | Hi, how can I help you? | What is a mixture? | A model with many experts.",
    "Who are you? | I am a small model.",
    "Good morning. | Good morning to you.",
    "What do you like? | I like numbers.",
    "My computer is slow. | Close some programs.",
    "My screen is dark. | Check the cable.",
    "Tell me a joke. | I know none.",
    "Do you sleep? | I never sleep.",
)


class Lesson(NamedTuple):
    """What a user says, in messages, and the right answer."""

    prompt: list[dict[str, str]]
    answer: str

    @property
    def worse(self) -> str:
        """The answer, broken off half-way."""
        return self.answer[: len(self.answer) // 2].strip()


def corpus() -> Iterator[list[str]]:
    """What is said in turn in each conversation of chatterbot-corpus, in English."""
    import chatterbot_corpus

    for path in sorted((Path(chatterbot_corpus.__file__).parent / "data/english").glob("*.yml")):
        for said in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            yield [" ".join(str(one).split()) for one in said]


def gym_numbers(seed: int) -> Iterator[tuple[str, list[int]]]:
    """Direction and numbers of tasks of reasoning-gym, which sort three digits."""
    import reasoning_gym

    sizes = {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9}
    other = seed * NUM_TASKS  # numbers of a task are drawn from this and its place
    for one in reasoning_gym.create_dataset("number_sorting", size=NUM_TASKS, seed=other, **sizes):
        told = one["metadata"]
        yield told["direction"], [int(float(number)) for number in told["original_numbers"]]


def sample_numbers() -> Iterator[tuple[str, list[int]]]:
    for number in range(20):
        for direction in ("ascending", "descending"):
            yield direction, [number % 10, 7 * number % 9, number // 10]


def conversations(found: Iterable[list[str]]) -> list[Lesson]:
    """One conversation, which ends in an answer, for each first question."""
    lessons: dict[str, Lesson] = {}
    for said in found:
        said = said[: len(said) // 2 * 2]
        if said and all(said) and len(said[-1]) > 1 and sum(map(len, said)) <= MOST_CHARACTERS:
            turns = enumerate(said[:-1])
            prompt = [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in turns]
            lessons.setdefault(said[0], Lesson(prompt, said[-1]))
    return list(lessons.values())


def tasks(found: Iterable[tuple[str, list[int]]]) -> list[Lesson]:
    """Lists of numbers to be sorted, each once."""
    lessons = {}
    for direction, numbers in found:
        right = sorted(numbers, reverse=direction == "descending")
        asked = f"Sort these numbers in {direction} order: {', '.join(map(str, numbers))}"
        prompt = [{"role": "user", "content": asked}]
        lessons[asked] = Lesson(prompt, " ".join(map(str, right)))
    return list(lessons.values())


def parts(found: list[Lesson], shares: tuple[float, ...], seed: int) -> list[list[Lesson]]:
    """The lessons in an order by chance, cut into parts of these shares."""
    random.Random(seed).shuffle(found)
    borders = [round(sum(shares[:i]) * len(found)) for i in range(len(shares) + 1)]
    return [found[begin:end] for begin, end in pairwise(borders)]


def said(content: str) -> list[dict[str, str]]:
    """Message of the assistant."""
    return [{"role": "assistant", "content": content}]


def record(name: str, one: Lesson, *, is_task: bool) -> dict:
    """What a file has of a lesson."""
    if name == "chats":
        return {"messages": [*one.prompt, *said(one.answer)]}
    if name == "pairs":
        answers = {"chosen": said(one.answer), "rejected": said(one.worse)}
        return {"prompt": one.prompt, **answers}
    if name == "prompts":
        return {"prompt": one.prompt, "answer": one.answer}
    told = {"answer": one.answer, "worse": one.worse, "is_task": is_task}
    return {"messages": one.prompt, **told}


def main(folder: Path, seed: int, *, is_sample: bool) -> None:
    """Write the files of FOLDER."""
    lessons = (
        conversations([one.split(" | ") for one in SAMPLE] if is_sample else corpus()),
        tasks(sample_numbers() if is_sample else gym_numbers(seed)),
    )
    cut = [parts(*of_kind, seed) for of_kind in zip(lessons, SHARES, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, *both in zip(FILES, *cut, strict=True):
        records = [record(name, one, is_task=bool(kind)) for kind, ones in enumerate(both) for one in ones]
        random.Random(seed).shuffle(records)
        text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder}/{name}.jsonl: {len(both[0]):,} conversations, {len(both[1]):,} tasks")
    if is_sample:
        (folder / "text.txt").write_text(f"{Path(__file__).read_text()}\n" * 5, encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place, *more = (word for word in sys.argv[1:] if word != "--sample")
    try:
        main(Path(place), int((more or [0])[0]), is_sample="--sample" in sys.argv)
    except ImportError as error:
        fix = "pip install -c constraints.txt 'expertmesh[chat]'"
        sys.exit(f"error: {error.name} is not installed; install the extra chat: {fix}")
