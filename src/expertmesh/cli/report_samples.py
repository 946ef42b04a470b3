"""Samples of a report: prompts, continuations, and a measure of the samples.

The measure is the share of sampled words that occur in the training text. The first word, and the last word of a
truncated continuation, are not counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from expertmesh.data.corpus import Corpus
    from expertmesh.runs.open import LoadedModel

PYTHON_PROMPTS = (
    "import os\nimport sys\n",
    "def main(",
    "class Test",
    "    def __init__(self",
    "if __name__ ==",
    "for i in range(",
    "    return ",
    "try:\n    ",
)
_PROMPT_WORDS = 4
_MOST_CHARACTERS = 20_000_000


@dataclass(frozen=True)
class Sample:
    """Prompt and its continuation."""

    prompt: str
    text: str  # the continuation
    is_cut: bool  # whether it ended at its maximum length, not at the end of the text


def is_python(corpus: "Corpus") -> bool:
    """Whether the documents are Python source, by their names."""
    documents = (*corpus.training, *corpus.validation)
    return all(document.name.partition("#")[0].endswith(".py") for document in documents)


def prompts_of(corpus: "Corpus | None", count: int) -> list[str]:
    """Prompts in the style of the training data."""
    if corpus is None:
        found: Sequence[str] = ("",)
    elif is_python(corpus):
        found = PYTHON_PROMPTS
    else:
        found = [_beginning(document.read()) for document in corpus.validation[:count]]
    return [found[i % len(found)] for i in range(count)]


def shortened(prompt: str, tokenizer: "Tokenizer", most: int) -> str:
    """Prompt, halved until it has at most `most` tokens: in a language without spaces four words may fill a page."""
    while len(tokenizer.encode(prompt, add_special_tokens=False).ids) > most:
        prompt = prompt[: len(prompt) // 2]
    return prompt


def _beginning(text: str) -> str:
    """First words of the first nonblank line."""
    line = next(filter(str.strip, text.splitlines()), "")
    return " ".join(line.split()[:_PROMPT_WORDS])


def sample(
    opened: "LoadedModel",
    *,
    prompts: Sequence[str],  # the prompts; "" is allowed
    num_tokens: int,  # maximum number of tokens of each
    temperature: float,  # 0: always the most likely token
    seed: int,
) -> list[Sample]:
    """Continuations of prompts."""
    from expertmesh.config.sampling import SamplingParams
    from expertmesh.data.data_progress import Progress
    from expertmesh.engine.texts import continued
    from expertmesh.errors import ConfigError

    if not prompts:
        return []
    model, text = opened.decoder, opened.text
    prompt_ids = list(map(text.prompt_ids, prompts))
    longest = max(map(len, prompt_ids))
    if longest >= model.max_seq_len:
        raise ConfigError(
            f"a prompt of {longest} tokens: must be shorter than max_seq_len={model.max_seq_len}; shorten it"
        )
    room = min(num_tokens, model.max_seq_len - longest)
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=room)
    told = Progress("written", total=len(prompts), unit="samples")
    outputs = told.over(continued(model, prompt_ids, params, text=text))
    return [
        Sample(prompt, output.text, output.finish_reason == "length")
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def measure(samples: Sequence[Sample], corpus: "Corpus | None") -> str:
    """Share of sampled words that occur in the training text, as one line."""
    if corpus is None:
        return "samples are not judged: the data are no text, or not there"
    parts = [word for sampled in samples for word in countable_words(sampled)]
    known = _words(document.read() for document in corpus.training)
    good = sum(word in known for word in parts)
    share = f" ({good / len(parts):.0%})" if parts else ""
    return f"sampled words that the training text has: {good} of {len(parts)}{share}"


def countable_words(sampled: Sample) -> list[str]:
    """Words of the continuation, without incomplete ones."""
    words = sampled.text.split()
    begins_inside = bool(sampled.prompt) and not sampled.text[:1].isspace()
    ends_inside = sampled.is_cut and not sampled.text[-1:].isspace()
    return words[int(begins_inside) : len(words) - int(ends_inside)]


def _words(texts: Iterable[str]) -> set[str]:
    """Distinct words of about the first `_MOST_CHARACTERS` characters."""
    found: set[str] = set()
    seen = 0
    for text in texts:
        found.update(text.split())
        seen += len(text)
        if seen >= _MOST_CHARACTERS:
            break
    return found
