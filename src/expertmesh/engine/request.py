"""Inputs of the engine: requests, and the sequences that answer them. Torch-free."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Literal, Protocol

from expertmesh.config.sampling import SamplingParams
from expertmesh.config.values import plain, type_of
from expertmesh.errors import ConfigError

FinishReason = Literal["stop", "length", "abort", "error"]


def token_ids_of(given: Any, *, what: str = "prompt") -> list[Any]:
    """Entries of a list of token ids, with integers of any kind as Python ints.

    Args:
        given: list, tuple, range, or one-dimensional tensor or array.
    """
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping | str | bytes)
    if not is_list or isinstance(given, AbstractSet) or getattr(given, "ndim", 1) != 1:
        shape = f" of shape {tuple(given.shape)}" if hasattr(given, "shape") else ""
        text = "a text, or " if what == "prompt" and not isinstance(given, str) else ""
        raise ConfigError(f"{what} is {type_of(given)}{shape}; it must be {text}a list of token ids; give one")
    return [plain(one) for one in (given.tolist() if hasattr(given, "tolist") else given)]


def for_prompts(params: Seq[SamplingParams]) -> list[SamplingParams]:
    """Parameters of the prompts of a call with one seed for all, so that their draws are independent.

    The first keeps the seed. Prompt i draws by a hash of seed and i, which is no other seed plus a number.
    """
    found = list(params)
    for place, one in enumerate(found):
        if place and one.seed is not None:
            found[place] = one.model_copy(update={"seed": hashed_seed(f"{one.seed}/prompt/{place}")})
    return found


def hashed_seed(text: str) -> int:
    """Seed in 0 ... 2^63 - 1 that a text stands for."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Rule(Protocol):
    """Constraint on the next tokens of an answer; see `expertmesh.engine.grammar`."""

    @property
    def end_ids(self) -> AbstractSet[int]:
        """End tokens, which may follow where the constraint is met."""
        ...

    def allowed(self, ids: Seq[int], *, may_end: bool = True) -> Any:
        """(V,) bool array: tokens that may follow; None: unknown."""
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
    """Prompt with all answers to it."""

    request_id: str  # chosen by the caller, or counted
    prompt_ids: tuple[int, ...]  # token ids of the prompt, not empty
    params: SamplingParams
    arrival: int  # index in the order of all requests
    max_tokens: int  # maximum tokens of an answer, determined on arrival
    end_ids: frozenset[int] = frozenset()  # end tokens, determined on arrival
    seed: int = 0  # seed of its random numbers
    # root prefix of its tokens: -1, or its adapter's, so that prefixes with different adapters are not shared
    root: int = -1
    # one per answer; the first computes the prompt, and the others share it
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
    """Answer to a prompt, as a state machine driven by the scheduler."""

    request: Request
    index: int  # index among the request's answers
    token_ids: list[int] = field(default_factory=list)  # prompt, then generated tokens
    # number of tokens whose keys and values are cached; prefix hits and preemption change only this
    num_computed: int = 0
    num_cached: int | None = None  # prompt tokens found in the prefix cache by its first step; None: it has had none
    num_counted: int = 0  # prompt tokens that are counted in the statistics
    blocks: list[int] = field(default_factory=list)  # block table
    # number of the prefix of its sealed blocks, and the number of these blocks; see `BlockPool.seal`
    prefix: tuple[int, int] = (-1, 0)
    state: State = State.WAITING  # see `State`
    finish_reason: FinishReason | None = None  # reason why it ended, or None
    is_guessed: bool = False  # whether it is a draft state of an answer; see `drafts`
    rule: "Rule | None" = None  # constraint on the next tokens; None: no constraint

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
