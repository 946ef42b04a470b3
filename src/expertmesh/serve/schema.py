"""Request schemas: OpenAI's fields, and vLLM's extensions. Bounds also appear in the OpenAPI description.

Lists and biases end at their first error: millions of errors would occupy the server for seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST_STOPS = 16
MOST_PROMPTS = 1024
MOST_ANSWERS = 128
MOST_TOPS = 20
MOST_MESSAGES = 10_000
"""Maximum messages of a conversation, and text parts of a message."""


def _whole(value: Any) -> Any:
    """Convert floats without a fraction to int, alone or in a list: JSON has one number type."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and any(type(one) is float for one in value):
        return [_whole(one) for one in value]
    return value


def _up_to_first_wrong(value: Any) -> Any:
    """Keep only the first wrong bias if there is one: Pydantic has no `fail_fast` for objects."""
    if type(value) is dict:
        for name, bias in value.items():
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                return {name: bias}
    return value


WholeNumber = Annotated[int, BeforeValidator(_whole)]
NotNegative = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
OrMinusOne = Annotated[int, Field(ge=-1), BeforeValidator(_whole)]
Answers = Annotated[int, Field(ge=1, le=MOST_ANSWERS), BeforeValidator(_whole)]
Tops = Annotated[int, Field(ge=0, le=MOST_TOPS), BeforeValidator(_whole)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), BeforeValidator(_whole)
]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_up_to_first_wrong)
]
Text = Annotated[str, Field(max_length=2**23)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(fail_fast=True, max_length=MOST_STOPS)]

REFUSED = {
    "suffix": "text behind the answer is not supported",
    "best_of": "answers are not ranked; ask for n of them",
    "tools": "calls of tools are not supported",
    "tool_choice": "calls of tools are not supported",
    "functions": "calls of functions are not supported",
    "function_call": "calls of functions are not supported",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no search",
    "guided_regex": "answers are free text, or JSON (response_format)",
    "guided_grammar": "answers are free text, or JSON (response_format)",
    "guided_choice": "answers are free text, or JSON (response_format)",
    "use_beam_search": "answers are drawn one by one",
}
"""Unsupported fields that would change an answer, with the reason. Other unknown fields are ignored."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Values of these fields that have no effect, and are accepted."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Sampling(BaseModel):
    """Fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: Answers | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: WholeNumber | None = None
    stop: StopText | Stops | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    max_tokens: NotNegative | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's
    top_k: OrMinusOne | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None


class CompletionRequest(Sampling):
    """Completion request: a text to continue."""

    prompt: (
        Text
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    logprobs: Tops | None = None
    echo: bool | None = None


class TextPart(BaseModel):
    """Text part of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)]

    @property
    def text(self) -> str:
        """Concatenated text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class ChatRequest(Sampling):
    """Chat completion request: a conversation to answer."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None


class TokenizeText(BaseModel):
    """Text to tokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(BaseModel):
    """Conversation to tokenize, followed by the start of an answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Messages
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Tokens to convert to text."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: TokenIds
