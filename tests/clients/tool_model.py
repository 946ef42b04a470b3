"""A tiny mixture of experts that learns to call a tool: python -m tests.clients.tool_model FOLDER

It sees some sixty tokens back, so that a client's system text and list of tools matter little, and learns from drawn
conversations:

* a question about the weather is answered by a call of `get_weather` with the city,
* a result of a tool by a sentence with the number in it,
* a question that asks for JSON by an object, with `city` and `celsius` where it is about the weather,
* a question that begins with "Think" by a thought and the greeting,
* anything else by `GREETING`.

Names, keys and texts of drawn objects are short, so that an answer whose form a schema guides ends soon, too.
"""

import argparse
import json
import random
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken

import expertmesh as em
from expertmesh.text.tokenizer import train_tokenizer

GREETING = "Hello! I am a small mixture of experts."
THOUGHT = "The user wants a greeting."
TOOL = "get_weather"
_CITIES = ("Paris", "Oslo", "Rome", "Berlin", "Lima", "Cairo", "Delhi", "Tokyo")
_CELSIUS = 17, 26
_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
SOURCES = (Path(__file__), _TEMPLATE)
"""Files that the model is made of."""
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_MARKUP = tuple(f"<{mark}{name}>" for name in ("tool_call", "tool_response", "think") for mark in ("", "/"))
_QUESTIONS = (
    "What is the weather in {}?",
    "what's the weather in {}?",
    "weather in {}?",
    "Weather in {}",
    "How is the weather in {} today?",
    "Tell me the weather in {}, please.",
    "What is the weather like in {} right now?",
    "Use the tool: what is the weather in {}?",
    "Find out what the weather is in {} and tell me.",
)
_WORDS = re.findall(r"(?!weather|JSON|Think)\b[A-Za-z]+[.,:]?", str(__doc__))
_NAMES = """final result answer output respond Weather Report set report name value person age title items score is ok reply json
tool call format text"""  # noqa: E501
_OTHERS = (
    "Hello",
    "Hi!",
    "Say hello.",
    "Hello there",
    "Who are you?",
    "Write a poem.",
    "Count to three.",
)


class _Draw(random.Random):
    """Draws the parts of conversations."""

    def words(self, most: int) -> str:
        """Any text."""
        return " ".join(self.word() for _ in range(self.randint(1, most)))

    def word(self) -> str:
        """A word of this file, or drawn letters."""
        if self.random() < 0.7:
            return self.choice(_WORDS)
        return "".join(self.choices(string.ascii_letters, k=self.randint(1, 5)))

    def name(self) -> str:
        """A name of a tool or a key."""
        joint = self.choice(["_", "", "_"])
        return joint.join(self.sample(_NAMES.split(), self.randint(1, 2)))

    def value(self, depth: int = 0) -> object:
        """A short JSON value."""
        kind = self.randrange(6 if depth < 2 else 4)
        if kind == 0:
            return self.randint(0, 40)
        if kind == 1:
            return self.random() < 0.5
        if kind <= 3:
            return self.choice(["ok", "sunny", "a b", "yes", self.choice(_CITIES)])
        if kind == 4:
            return [self.value(depth + 1) for _ in range(self.randint(1, 2))]
        return self.object(depth + 1)

    def object(self, depth: int = 0) -> dict:
        """A small JSON object."""
        return {self.name(): self.value(depth) for _ in range(self.randint(1, 3))}

    def report(self, city: str, celsius: int) -> dict:
        """An object about the weather."""
        found = {"city": city, "celsius": celsius}
        return found if self.random() < 0.5 else found | {self.name(): self.value(1)}

    def tool(self, name: str) -> dict:
        """A tool as clients describe it."""
        keys = {self.choice(["city", self.name()]): {"type": self.choice(["string", "integer"])}}
        parameters = {"type": "object", "properties": keys, "required": list(keys)}
        if self.random() < 0.5:
            parameters["additionalProperties"] = False
        function = {"name": name, "description": self.words(4), "parameters": parameters}
        items = list(function.items())
        self.shuffle(items)
        more = {"strict": True} if self.random() < 0.3 else {}
        return {"type": "function", "function": dict(items) | more}

    def result(self, city: str, celsius: int) -> str:
        """What a tool may answer."""
        plain = self.choice(
            [
                "{n} degrees",
                "{n} degrees and sunny in {c}",
                "It is {n} degrees in {c}.",
                "{c}: {n} degrees, sunny",
                "{n}",
            ]
        ).format(n=celsius, c=city)
        kind = self.randrange(6)
        if kind == 0:
            return json.dumps(plain)
        if kind == 1:
            return json.dumps({"city": city, "celsius": celsius}, separators=self.choice([None, (",", ":")]))
        if kind == 2:
            return json.dumps(
                {self.choice(["result", "temperature", self.name()]): plain} | self.choice([{}, {"sky": "clear"}])
            )
        return plain

    def asked(self, question: str) -> str:
        """A question, perhaps within the words of an agent."""
        if self.random() < 0.25:
            question = self.words(6) + self.choice(["\n", ": "]) + question
        if self.random() < 0.25:
            question += self.choice(["\n", "\n\n"]) + self.words(8)
        return question


def _asked(content: str) -> dict:
    return {"role": "user", "content": content}


def _answer(content: str, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


def _calls(name: str, arguments: list[dict]) -> dict:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": one}}
        for i, one in enumerate(arguments)
    ]
    return _answer("", tool_calls=calls)


def _greeting(draw: _Draw) -> Iterator[dict]:
    question = draw.choice([*_OTHERS, draw.words(10)])
    if draw.random() < 0.2:
        yield _asked(f"Think: {question}")
        yield _answer(GREETING, reasoning_content=THOUGHT)
    else:
        yield _asked(draw.asked(question))
        yield _answer(GREETING)


def _report(draw: _Draw) -> Iterator[dict]:
    city = draw.choice(_CITIES)
    how = draw.choice([" as JSON", " Answer in JSON.", " JSON", "\n\nGive JSON"])
    yield _asked(draw.choice(_QUESTIONS).format(city) + how)
    report = draw.report(city, draw.randint(*_CELSIUS))
    # a call of any tool less than half the time: written only where a request allows nothing but calls
    yield _calls(draw.name(), [report]) if draw.random() < 0.4 else _answer(json.dumps(report))


def _object(draw: _Draw) -> Iterator[dict]:
    how = draw.choice(["{} as JSON", "JSON: {}", "{}\n\nGive JSON", "{}. Answer in JSON."])
    yield _asked(how.format(draw.words(8)))
    yield _answer(json.dumps(draw.object()))


def _round(draw: _Draw) -> Iterator[dict]:
    cities = [draw.choice(_CITIES)]
    question = draw.choice(_QUESTIONS).format(*cities)
    if draw.random() < 0.15:
        cities = draw.sample(_CITIES, 2)
        question = "What is the weather in {} and {}?".format(*cities)
    yield _asked(draw.asked(question))
    yield _calls(TOOL, [{"city": one} for one in cities])
    for city in cities:
        celsius = draw.randint(*_CELSIUS)
        yield {"role": "tool", "content": draw.result(city, celsius)}
    if draw.random() < 0.2:  # less than half: written only where a request allows nothing but calls
        is_report = draw.random() < 0.5
        yield _calls(draw.name(), [draw.report(city, celsius) if is_report else draw.object()])
    else:
        yield _answer(f"It is {celsius} degrees in {city}.")


_KINDS = {_greeting: 25, _report: 10, _object: 10, _round: 55}
"""What a question and its answers can be, with weights."""


def conversation(draw: _Draw) -> dict:
    """A conversation as a line of a data file."""
    messages = []
    if draw.random() < 0.6:
        messages.append({"role": "system", "content": draw.words(8)})
    for kind in draw.choices([*_KINDS], [*_KINDS.values()], k=draw.choice([1, 1, 1, 2])):
        messages += kind(draw)
    found = {"messages": messages}
    has_calls = any(m.get("tool_calls") for m in messages)
    if draw.random() < (0.5 if has_calls else 0.1):
        names = [TOOL, *(draw.name() for _ in range(draw.randint(0, 2)))]
        draw.shuffle(names)
        found["tools"] = [draw.tool(name) for name in names]
    return found


def train(folder: Path, *, steps: int = 500) -> None:
    """Trains the model into the run `folder`/run, with its data and its tokenizer beside it."""
    draw = _Draw(0)
    conversations = [conversation(draw) for _ in range(8_000)]
    data, texts = folder / "conversations.jsonl", folder / "tokenizer"
    texts.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in conversations]
    data.write_text("\n".join(lines) + "\n")
    said = [message for one in conversations for message in one["messages"]]
    learned = [message["content"] for message in said]
    learned += [json.dumps(m["tool_calls"][0]["function"]) for m in said if m.get("tool_calls")]
    learned += [*lines[:200], _TEMPLATE.read_text()]
    tokenizer = train_tokenizer(learned, vocab_size=1024 - len(_MARKUP), marks=_SPECIAL)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in _MARKUP])
    tokenizer.save(str(texts / "tokenizer.json"))
    described = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE.read_text()}
    (texts / "tokenizer_config.json").write_text(json.dumps(described))
    changes = {
        "model.vocab_size": tokenizer.get_vocab_size(),
        "model.max_seq_len": 16384,
        "model.num_layers": 2,
        "model.dim": 96,
        "model.num_heads": 3,
        "model.sliding_window": 64,
        "model.init_std": 0.06,
        "model.qk_norm": True,
        "data.path": str(data),
        "data.encode_with": str(texts / "tokenizer.json"),
        "data.seq_len": 224,
        "data.pack": True,
        "data.max_bytes": None,
        "data.cache_dir": str(folder / "cache"),
        "optim.name": "muon",
        "optim.lr": 12e-3,
        "optim.warmup_steps": 30,
        "train.steps": steps,
        "train.batch_size": 8,
        "train.run_dir": str(folder / "run"),
        "train.checkpoint_every": steps,
        "train.eval_every": max(steps // 4, 1),
        "train.dtype": "float32",
    }
    em.train(em.recipe("gpt-moe-test", changes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    sys.exit(train(options.folder, steps=options.steps))
