"""Options of a request: each is declared here once, for Python, the command line, HTTP and the reference."""

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from expertmesh.config.base import Config, FieldError, Fix
from expertmesh.config.fields import Spelling
from expertmesh.config.values import MOST_INT64, plain
from expertmesh.errors import named

LONGEST_STOP = 1024
"""Maximum characters of a stop string; this much text may be held back while a stop string is possible."""
MOST_CHOICES = 10_000
"""Maximum number of texts that an answer is one of."""
GUIDES = ("json_schema", "choice", "regex", "grammar")
"""Options that say what the whole answer is; a request has at most one."""
COLDEST = 1e-6
"""Temperature below which sampling is greedy, because logits divided by it exceed FP32."""
OF_OUTPUTS = frozenset({"n", "logprobs", "prompt_logprobs", "return_routed_experts"})
"""Options that ask for more than the text of one answer."""
TEXT_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "seed": 0}
"""Defaults of a call that writes texts, where they are not the options' own."""
_LARGEST = 3.0e38
_DIGITS = re.compile("[0-9]{1,20}")


def must(rule: str, fix: str = "give one") -> WrapValidator:
    """Rule and fix in the errors of a type: `Annotated[int, Field(ge=0), must("be a token id")]`; entries keep their
    own."""

    def checked(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            if error.errors(include_url=False)[0]["loc"]:
                raise
            raise FieldError((), value, f"must {rule}", fix) from None

    return WrapValidator(checked)


def _biases(given: Any) -> Any:
    """Biases by token id; in JSON, ids are texts."""
    if not isinstance(given, Mapping):
        return given
    ids = [int(i) if isinstance(i, str) and _DIGITS.fullmatch(i) else plain(i) for i in given]
    if len({*ids}) < len(ids):
        raise FieldError((), given, "has two numbers for one token id", "give one for each")
    return dict(zip(ids, map(plain, given.values()), strict=True))


TokenId = Annotated[int, Field(ge=0), must("be a token id")]
StopText = Annotated[
    str,
    Field(min_length=1, max_length=LONGEST_STOP),
    must(f"be a string of 1 to {LONGEST_STOP} characters"),
]
Whole = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Switch = Annotated[bool, must("be True or False")]
Tops = Annotated[int, Field(ge=0, le=100)]


class SamplingParams(Config):
    """Sampling parameters and end conditions of a request.

    Logits are processed in this order: penalties, logit_bias, temperature, top_k, top_p, min_p. Logprobs are the
    log-softmax of the raw logits, before any of these.

    Raises:
        ConfigError: a name is unknown or a value breaks its rule.

    Example:
        >>> em.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop="\\n").stop
        ('\\n',)
    """

    model_config = ConfigDict(strict=True)

    temperature: Annotated[float, Fix("use 0 for the most likely token")] = Field(default=1.0, ge=0, le=_LARGEST)
    """Sampling temperature; 0: greedy, lowest id on a tie."""
    top_k: int | None = Field(default=None, ge=1, le=MOST_INT64)
    """Number of most likely tokens to sample from; none: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass of the most likely tokens to sample from (nucleus sampling, Holtzman et al. 2020); none: all.

    The smallest set is kept whose probabilities, after top_k, sum to at least this.
    """
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability of a token, relative to the most likely one."""
    presence_penalty: Penalty = 0.0
    """Presence penalty: number subtracted from the logit of each token generated so far."""
    frequency_penalty: Penalty = 0.0
    """Frequency penalty: number subtracted from a token's logit for each time it was generated."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=_LARGEST)
    """Repetition penalty of tokens in prompt or answer: divisor of positive logits, factor of negative ones (Keskar et
    al. 2019)."""
    logit_bias: Annotated[
        dict[TokenId, Bias],
        must("be numbers by token id", 'for example {"13": -100}'),
        BeforeValidator(_biases),
    ] = {}
    """Biases added to the logits, by token id."""
    n: int = Field(default=1, ge=1, le=1024)
    """Number of answers to the prompt, sampled independently."""
    seed: int | None = Field(default=None, ge=0, le=MOST_INT64)
    """Random seed; none: unseeded.

    Random numbers depend only on it, the answer's index and the position. If one call gives it to several prompts, all
    behind the first draw by a hash of it and their index.
    """
    max_tokens: Annotated[int | None, Fix("ask for a token or more"), Spelling(also=("max_new_tokens",))] = Field(
        default=None, ge=1
    )
    """Maximum number of tokens to generate; none: up to the model's maximum length."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens before an end token or stop string can end the answer."""
    stop: Annotated[
        tuple[StopText, ...],
        must("be a string, or several", "give one"),
        Field(max_length=64),
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ] = ()
    """Stop strings; the answer ends before the first of them."""
    stop_token_ids: Annotated[tuple[TokenId, ...], must("be a list of token ids", "for example [13]")] = ()
    """Token ids that end the answer, in addition to the model's end tokens."""
    ignore_eos: Switch = False
    """Whether the model's end tokens are ignored."""
    logprobs: Tops | None = None
    """Number of most likely tokens whose logprobs are returned with the chosen token's; none: no logprobs."""
    prompt_logprobs: Tops | None = None
    """Number of most likely tokens whose logprobs are returned at each prompt token; none: no logprobs."""
    return_routed_experts: Switch = False
    """Whether the experts of every token are returned."""
    json_schema: Annotated[InstanceOf[Mapping[str, Any]] | None, must("be a JSON schema", "give a mapping")] = None
    """JSON schema of the answer, {} for any JSON; needs the extra `json`; none: any text.

    max_tokens or a stop may cut the answer. Where nothing else may follow, the model's end tokens are allowed despite
    `ignore_eos` and `min_tokens`.
    """
    choice: (
        Annotated[
            tuple[Whole, ...],
            must("be a list of texts", 'for example ["yes", "no"]'),
            Field(min_length=1, max_length=MOST_CHOICES),
        ]
        | None
    ) = None
    """Allowed answers: the answer is exactly one of these texts; needs the extra `json`; none: any text."""
    regex: Annotated[Whole | None, must("be a regular expression", "give a text of a character or more")] = None
    """Regular expression that the whole answer matches, as in a schema's `pattern`; needs the extra `json`; none: any
    text."""
    grammar: Annotated[Whole | None, must("be a grammar", "give a text of a character or more")] = None
    """Grammar of the answer, Lark's (`start: ...`) or llama.cpp's GBNF (`root ::= ...`); needs the extra `json`; none:
    any text."""

    kept_special_ids: Annotated[tuple[TokenId, ...], must("be a list of token ids", "for example [13]")] = ()
    """Ids of special tokens that are kept in the answer's text, such as markers of tool calls; others are skipped."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_python_writes_it(cls, value: Any, _: ValidationInfo) -> Any:
        """Numbers of NumPy and torch as Python's, and a tuple of an array or another collection of them.

        A request is strict: a text is no number, and one value is no list.
        """
        if isinstance(value, str | int | float | bytes | Mapping) or getattr(value, "ndim", 1) > 1:
            return value
        if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
            return plain(value)
        values = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, AbstractSet):  # whose order says nothing
            values = sorted(value, key=lambda one: (len(str(one)), str(one)))
        return tuple(map(plain, values))

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        """Compares options; numbers and texts may be any that their fields allow."""
        self.require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be at most {named('max_tokens', self.max_tokens)}",
            "ask for fewer",
        )
        guides = [name for name in GUIDES if getattr(self, name) is not None]
        self.require(
            len(guides) < 2,
            guides[-1] if guides else "regex",
            f"is given beside {named(guides[0]) if guides else ''}",
            "leave one of them out",
        )
        return self

    @property
    def guide(self) -> tuple[str, Any] | None:
        """Name and value of the option that says what the whole answer is; None: it is any text."""
        given = ((name, getattr(self, name)) for name in GUIDES)
        return next((one for one in given if one[1] is not None), None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < COLDEST
