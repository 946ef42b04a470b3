"""Inputs of the engine: sampling parameters, requests, and the sequences that answer them. Torch-free."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, Literal, Protocol

from expertmesh.config.values import MOST_INT64, WHOLE, Number, is_number, plain, quoted
from expertmesh.errors import ConfigError

FinishReason = Literal["stop", "length", "abort", "error"]

LONGEST_STOP = 1024
"""Maximum characters of a stop string; this much text may be held back while a stop string is possible."""
MOST_STOPS = 64
MOST_LOGPROBS = 100
COLDEST = 1e-6
"""Temperature below which sampling is greedy, because logits divided by it exceed FP32."""


def token_ids_of(given: Any, *, what: str = "prompt") -> list[Any]:
    """Entries of a list of token ids, with integers of any kind as Python ints.

    Args:
        given: list, tuple, range, or one-dimensional tensor or array.
        what: name in the message.

    Raises:
        ConfigError: it has another type or shape.
    """
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping | str | bytes)
    if not is_list or isinstance(given, AbstractSet) or getattr(given, "ndim", 1) != 1:
        shape = f" of shape {tuple(given.shape)}" if hasattr(given, "shape") else ""
        text = "a text, or " if what == "prompt" and not isinstance(given, str) else ""
        raise ConfigError(
            f"{what} is a {type(given).__name__}{shape}; it must be {text}a list of token ids; give one"
        )
    return [plain(one) for one in (given.tolist() if hasattr(given, "tolist") else given)]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and end conditions of a request.

    Logits are processed in this order: penalties, logit_bias, temperature, top_k, top_p, min_p. Logprobs are the
    log-softmax of the raw logits, before any of these.

    Attributes:
        temperature: divisor of the logits; 0: the most likely token, the smaller id on a tie.
        top_k: keeps only the k most likely tokens; None: all.
        top_p: of those, keeps the smallest set of most likely tokens whose probabilities sum to at least p (Holtzman et
            al. 2020); None: all.
        min_p: removes tokens less likely than min_p times the most likely one; 0: none.
        presence_penalty: subtracted from the logit of each token that was generated; in [-2, 2].
        frequency_penalty: subtracted once for each time that it was generated; in [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it, negative ones multiplied
            (Keskar et al. 2019); at least 0.01, 1: off.
        logit_bias: added to the logits of these token ids; each in [-100, 100].
        n: number of answers to the prompt, sampled independently.
        seed: seed of the random numbers, which depend only on it, the answer's index and the position; None: a fresh
            one. If one call gives it to several prompts, all behind the first draw by a hash of it and their index.
        max_tokens: maximum number of tokens of an answer; None: up to the model's maximum length.
        min_tokens: minimum number of tokens before an end token or stop string can end the answer.
        stop: stop string or strings; an answer ends before them.
        stop_token_ids: end tokens in addition to the model's.
        ignore_eos: whether the model's end tokens are ignored.
        logprobs: number of most likely tokens whose logprobs are returned with the chosen token's; None: no logprobs.
        prompt_logprobs: number of most likely tokens whose logprobs are returned at each prompt token; None: no
            logprobs.
        return_routed_experts: whether the experts of every token are returned.
        json_schema: JSON schema of the answer, {} for any JSON; max_tokens or a stop may cut the answer. Where nothing
            else may follow, the model's end tokens are allowed despite `ignore_eos` and `min_tokens`. Needs the extra
            `json`. None: any text.

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
        """Check the values, and convert single strings and lists to tuples."""
        for name, rule in _RULES.items():
            rule.check(name, getattr(self, name))
        for name in ("ignore_eos", "return_routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    name, quoted(getattr(self, name)), "must be True or False", "give one"
                )
        for name, kind, what in _SEVERAL:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bytes):
                raise ConfigError(name, quoted(value), f"must be {what}", "give that")
        ends: Any = self.stop_token_ids
        ends = sorted(ends) if isinstance(ends, AbstractSet) else ends  # a set's order says nothing
        ends = token_ids_of(ends, what="stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(ends))
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        biases = {plain(one): plain(value) for one, value in self.logit_bias.items()}
        if len(biases) < len(self.logit_bias):
            raise ConfigError("logit_bias: has two numbers for one token id; give one for each")
        object.__setattr__(self, "logit_bias", biases)
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            shown = f"a {type(self.json_schema).__name__}"
            raise ConfigError("json_schema", shown, "must be a JSON schema", "give a mapping")
        if len(stops) > MOST_STOPS:
            raise ConfigError(
                "stop", f"{len(stops)} strings", f"at most {MOST_STOPS}", "give fewer"
            )
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP:
                shown = (
                    f"{len(text)} characters" if isinstance(text, str) and text else quoted(text)
                )
                rule_text = f"each is a string of 1 to {LONGEST_STOP} characters"
                raise ConfigError("stop", shown, rule_text, "give others")
        for token_id in (*self.stop_token_ids, *self.logit_bias):
            if not is_number(token_id, WHOLE) or token_id < 0:
                raise ConfigError(
                    "stop_token_ids and logit_bias",
                    quoted(token_id),
                    "must be a token id",
                    "give one",
                )
        for value in self.logit_bias.values():
            _BIAS.check("logit_bias", value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                "min_tokens",
                self.min_tokens,
                f"must be at most max_tokens={self.max_tokens}",
                "ask for fewer",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < COLDEST


def for_prompts(params: Seq[SamplingParams]) -> list[SamplingParams]:
    """Parameters of the prompts of a call with one seed for all, so that their draws are independent.

    The first keeps the seed. Prompt i draws by a hash of seed and i, which is no other seed plus a number.
    """
    return [replace(one, seed=_seed_of(one.seed, place)) for place, one in enumerate(params)]


def _seed_of(seed: int | None, place: int) -> int | None:
    if seed is None or place == 0:
        return seed
    digest = blake2b(f"{int(seed)}/prompt/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_SEVERAL: tuple[tuple[str, type, str], ...] = (
    ("stop", Iterable, "a string, or several"),
    ("stop_token_ids", Iterable, "a list of token ids"),
    ("logit_bias", Mapping, "numbers by token id"),
)
_MOST = 3.0e38
_ALL = "leave it out to keep all tokens"
_BIAS = Number(-100, 100)
_RULES = {
    "temperature": Number(0, _MOST, "use 0 for the most likely token"),
    "top_k": Number(1, MOST_INT64, _ALL, types=WHOLE, optional=True),
    "top_p": Number(0, 1, _ALL, is_open=True, optional=True),
    "min_p": Number(0, 1),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "repetition_penalty": Number(0.01, _MOST),
    "n": Number(1, 1024, types=WHOLE),
    "seed": Number(0, MOST_INT64, types=WHOLE, optional=True),
    "max_tokens": Number(1, fix="ask for a token or more", types=WHOLE, optional=True),
    "min_tokens": Number(0, types=WHOLE),
    "logprobs": Number(0, MOST_LOGPROBS, types=WHOLE, optional=True),
    "prompt_logprobs": Number(0, MOST_LOGPROBS, types=WHOLE, optional=True),
}


class Rule(Protocol):
    """Constraint on the next tokens of an answer; see `expertmesh.engine.grammar`."""

    @property
    def end_ids(self) -> AbstractSet[int]:
        """End tokens, which may follow where the constraint is met."""
        ...

    def allowed(self, ids: Seq[int], *, may_end: bool = True) -> Any:
        """(V,) bool: tokens that may follow; None: unknown."""
        ...

    def problem(self, ids: Seq[int]) -> str | None:
        """Reason why no token can follow; None: one can."""
        ...


class State(Enum):
    """State of a sequence: `waiting` for blocks or for its request's prompt, `running` with blocks, or `finished`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Prompt with all answers to it.

    Attributes:
        request_id: chosen by the caller, or counted.
        prompt_ids: token ids of the prompt, not empty.
        params: sampling parameters.
        arrival: index in the order of all requests.
        max_tokens: maximum tokens of an answer, determined on arrival.
        end_ids: end tokens, determined on arrival.
        seed: seed of its random numbers.
        root: root prefix of its tokens: -1, or its adapter's, so that prefixes with different adapters are not shared.
        sequences: one per answer; the first computes the prompt, and the others share it.
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
        """Create the sequences."""
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended."""
        return all(one.state is State.FINISHED for one in self.sequences)


@dataclass(eq=False)
class Sequence:
    """Answer to a prompt, as a state machine driven by the scheduler.

    Attributes:
        request: its request.
        index: index among the request's answers.
        token_ids: prompt, then generated tokens.
        num_computed: number of tokens whose keys and values are cached; prefix hits and preemption change only this.
        num_cached: prompt tokens found in the prefix cache by its first step; None: it has had none.
        num_counted: prompt tokens that are counted in the statistics.
        blocks: block table.
        prefix: number of the prefix of its sealed blocks, and the number of these blocks; see `BlockPool.seal`.
        state: see `State`.
        finish_reason: reason why it ended, or None.
        is_guessed: whether it is a draft state of an answer; see `drafts`.
        rule: constraint on the next tokens; None: no constraint.
    """

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    num_counted: int = 0
    blocks: list[int] = field(default_factory=list)
    prefix: tuple[int, int] = (-1, 0)
    state: State = State.WAITING
    finish_reason: FinishReason | None = None
    is_guessed: bool = False
    rule: "Rule | None" = None

    def __post_init__(self) -> None:
        """Start with the prompt."""
        self.token_ids = list(self.request.prompt_ids)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the cache state: no token is computed."""
        self.num_computed, self.prefix = 0, (self.request.root, 0)

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def new_ids(self) -> list[int]:
        """Generated token ids."""
        return self.token_ids[self.num_prompt :]

    @property
    def order(self) -> tuple[int, int]:
        """Scheduling order: earlier requests first, then earlier answers."""
        return self.request.arrival, self.index
