"""What is asked of the engine: sampling parameters, requests, and the sequences that answer them. Torch-free."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, Protocol

from expertmesh.errors import ConfigError

FinishReason = Literal["stop", "length", "abort", "error"]

LONGEST_STOP = 1024
"""Characters of a stop string, at most: so much text is held back while a stop may be coming."""
MOST_STOPS = 64
MOST_LOGPROBS = 100
COLDEST = 1e-6
"""Logits over a smaller temperature leave FP32; what remains is the most likely token."""


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a whole number (`kind` is int), or any (float). True and False are none; NumPy's numbers are."""
    abstract = Integral if kind is int else Real
    return isinstance(value, abstract) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when they end.

    Logits are changed in this order: penalties, logit_bias, temperature, top_k, top_p, min_p. A logprob is the log-softmax
    of the raw logits, before any of these.

    Attributes:
        temperature: logits are divided by it; 0: the most likely token, the smaller id on a tie.
        top_k: only the k most likely tokens stay; None: all.
        top_p: of those, the fewest most likely whose probabilities sum to at least p stay (Holtzman et al. 2020); None: all.
        min_p: tokens less likely than min_p times the most likely one go; 0: none.
        presence_penalty: subtracted from the logit of each token that was generated; in [-2, 2].
        frequency_penalty: subtracted once for each time that it was generated; in [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it, negative ones multiplied
            (Keskar et al. 2019); above 0, 1: off.
        logit_bias: added to the logits of these token ids; each in [-100, 100].
        n: answers to one prompt, each drawn on its own.
        seed: of the random numbers, which depend on it, the answer's index and the position alone; None: a fresh one.
        max_tokens: most tokens of an answer; None: as many as the model has room for.
        min_tokens: an answer does not end by an end token or stop before it has so many.
        stop: text before which an answer ends; a string or several.
        stop_token_ids: tokens before which it ends, beside the model's own.
        ignore_eos: whether the model's own end tokens count for nothing.
        logprobs: the chosen token's logprob, and those of so many most likely ones; None: none are returned.
        prompt_logprobs: the same of the prompt's tokens.
        return_routed_experts: whether the experts of every token are returned.
        json_schema: the answer is JSON of this schema, {} for any, unless max_tokens or a stop of the request cuts it; end tokens count
            whatever `ignore_eos` and `min_tokens` say where nothing else may follow. Needs the extra `json`; None: any text.

    Raises:
        ConfigError: a value breaks its rule.

    Example:
        >>> em.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop="\\n").stop
        ('\\n',)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Checks the values, and makes tuples of what may be given as one string or a list."""
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name))
        for name in ("ignore_eos", "return_routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    name, repr(getattr(self, name)), "must be True or False", "give one"
                )
        lists = "a string, or several", "a list of token ids", "numbers by token id"
        for name, kind, what in zip(_SEVERAL, (Iterable, Iterable, Mapping), lists, strict=True):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(name, repr(getattr(self, name)), f"must be {what}", "give that")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            shown = f"a {type(self.json_schema).__name__}"
            raise ConfigError("json_schema", shown, "must be a JSON schema", "give a mapping")
        if len(stops) > MOST_STOPS:
            raise ConfigError(
                "stop", f"{len(stops)} strings", f"at most {MOST_STOPS}", "give fewer"
            )
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP:
                shown = repr(text) if len(repr(text)) < 60 else f"{len(text)} characters"
                rule_text = f"each is a string of 1 to {LONGEST_STOP} characters"
                raise ConfigError("stop", shown, rule_text, "give others")
        for token_id in (*self.stop_token_ids, *self.logit_bias):
            if not is_number(token_id, int) or token_id < 0:
                raise ConfigError(
                    "stop_token_ids and logit_bias",
                    repr(token_id),
                    "must be a token id",
                    "give one",
                )
        for value in self.logit_bias.values():
            _Rule(float, -100.0, 100.0).check("logit_bias", value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                "min_tokens",
                self.min_tokens,
                f"must be at most max_tokens={self.max_tokens}",
                "ask for fewer",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < COLDEST


@dataclass(frozen=True)
class _Rule:
    kind: type
    lowest: float
    highest: float
    optional: bool = False
    is_open: bool = False  # whether `lowest` itself is refused
    fix: str = "choose another"

    def check(self, name: str, value: object) -> None:
        """Raise ConfigError unless the value is of the kind and in the range."""
        if value is None and self.optional:
            return
        what = "a whole number" if self.kind is int else "a number"
        if not is_number(value, self.kind):
            raise ConfigError(name, repr(value), f"must be {what}", "give one")
        # whole numbers as they are: 2^63 - 1 as a float is 2^63
        known: Any = value
        number = int(known) if self.kind is int else float(known)
        inside = self.lowest < number if self.is_open else self.lowest <= number
        if not (inside and number <= self.highest):  # NaN is in no range
            low = f"{'above' if self.is_open else 'at least'} {self.lowest:g}"
            most = "2^63 - 1" if self.highest == _LARGEST else f"{self.highest:g}"
            high = "" if self.highest == float("inf") else f" and at most {most}"
            raise ConfigError(name, repr(value), f"must be {low}{high}", self.fix)


_SEVERAL = "stop", "stop_token_ids", "logit_bias"
_MOST = 3.0e38
_LARGEST = 2**63 - 1
_ALL = "leave it out to keep all tokens"
_RULES = {
    "temperature": _Rule(float, 0.0, _MOST, fix="use 0 for the most likely token"),
    "top_k": _Rule(int, 1, _LARGEST, optional=True, fix=_ALL),
    "top_p": _Rule(float, 0.0, 1.0, optional=True, is_open=True, fix=_ALL),
    "min_p": _Rule(float, 0.0, 1.0),
    "presence_penalty": _Rule(float, -2.0, 2.0),
    "frequency_penalty": _Rule(float, -2.0, 2.0),
    "repetition_penalty": _Rule(float, 0.0, _MOST, is_open=True),
    "n": _Rule(int, 1, 1024),
    "seed": _Rule(int, 0, _LARGEST, optional=True),
    "max_tokens": _Rule(int, 1, float("inf"), optional=True, fix="ask for a token or more"),
    "min_tokens": _Rule(int, 0, float("inf")),
    "logprobs": _Rule(int, 0, MOST_LOGPROBS, optional=True),
    "prompt_logprobs": _Rule(int, 0, MOST_LOGPROBS, optional=True),
}


class Rule(Protocol):
    """Which tokens may come next in an answer; see `expertmesh.engine.grammar`."""

    def allowed(self, ids: Seq[int], *, may_end: bool = True) -> Any:
        """(V,) bool: which may follow some tokens; None: nobody can say."""
        ...

    def problem(self, ids: Seq[int]) -> str | None:
        """Why no token can follow; None: one can."""
        ...


class State(Enum):
    """Where a sequence is: `waiting` for room or for its request's prompt, `running` with blocks, or `finished`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and all answers to it.

    Attributes:
        request_id: chosen by the caller, or counted.
        prompt_ids: not empty.
        params: how its answers are chosen.
        arrival: place in the order of all requests.
        max_tokens: most tokens of an answer, settled when the request was taken.
        end_ids: tokens that end an answer, settled then, too.
        seed: of its random numbers.
        root: number of the prefix before its first token: -1, or that of its adapter, whose keys and values are others.
        sequences: one per answer; the first one computes the prompt, from which the others go on.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    seed: int = 0
    root: int = -1
    sequences: list["Sequence"] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes the sequences."""
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended."""
        return all(one.state is State.FINISHED for one in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One answer: a state machine that the scheduler moves.

    Attributes:
        request: whose answer this is.
        index: which of its answers.
        token_ids: the prompt, then what was generated.
        num_computed: tokens whose keys and values are in blocks; prefix hits and preemption only move this.
        num_cached: tokens of the prompt that a prefix hit gave when the sequence was first admitted.
        blocks: the block table.
        prefix: number of the prefix that its sealed blocks make up, and how many blocks these are; see `BlockPool.seal`.
        state: see `State`.
        finish_reason: why it ended.
        is_guessed: whether this only stands for the answer after some tokens that are guesses; see `drafts`.
        rule: says which tokens may come next; None: all.
    """

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    prefix: tuple[int, int] = (-1, 0)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    is_guessed: bool = False
    rule: "Rule | None" = None

    def __post_init__(self) -> None:
        """Begins with the prompt."""
        self.token_ids = list(self.request.prompt_ids)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing of it is in blocks any more."""
        self.num_computed, self.prefix = 0, (self.request.root, 0)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def new_ids(self) -> list[int]:
        """What was generated."""
        return self.token_ids[self.num_prompt :]

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: earlier requests, then earlier answers."""
        return self.request.arrival, self.index
