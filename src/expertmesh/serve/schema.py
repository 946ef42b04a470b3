"""Request schemas: OpenAI's fields, and vLLM's extensions. Bounds also appear in the OpenAPI description.

Lists and biases end at their first error: millions of errors would occupy the server for seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from expertmesh.text.chat import RESERVED_VARIABLES

MOST_STOPS = 16
MOST_PROMPTS = 1024
MOST_ANSWERS = 128
MOST_TOPS = 20
MOST_MESSAGES = 10_000
"""Maximum messages of a conversation, and text parts of a message; not in the description, whose readers write lists
of every stated length.
"""


def _whole(value: Any) -> Any:
    """Convert floats without a fraction to int, alone or in a list: JSON has one number type."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and any(type(one) is float for one in value):
        return [_whole(one) for one in value]
    return value


def _few(value: Any) -> Any:
    """Raise Pydantic's error of a long list if it has more than `MOST_MESSAGES` items."""
    if type(value) is list and len(value) > MOST_MESSAGES:
        text = "List should have at most {most} items"
        raise PydanticCustomError("too_long", text, {"most": MOST_MESSAGES})
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
    "guided_whitespace_pattern": "answers are free text, or JSON (response_format)",
    "structural_tag": "answers are free text, or JSON (response_format)",
    "use_beam_search": "answers are drawn one by one",
    "length_penalty": "answers are drawn one by one",
    "typical_p": "tokens are chosen by top_k, top_p and min_p",
    "bad_words": "words are not forbidden; logit_bias makes tokens unlikely",
    "allowed_token_ids": "all tokens are allowed; logit_bias makes some unlikely",
    "logits_processors": "programs of clients do not run",
    "vllm_xargs": "programs of clients do not run",
    "include_stop_str_in_output": "an answer ends before its stop",
    "skip_special_tokens": "the text of an answer has no special tokens; return_token_ids shows them",
    "add_special_tokens": "a text begins with the model's start tokens, a conversation as its template writes it",
    "truncate_prompt_tokens": "prompts are not cut",
    "prompt_logprobs": "only completions have those of a prompt, by echo and logprobs",
    "prompt_embeds": "a prompt is text or token ids",
    "echo": "the last message is not repeated",
    "chat_template": "the template is the model's",
    "documents": "write them into a message, or for a template that reads them into chat_template_kwargs",
    "enable_thinking": "it is a variable of templates; write it into chat_template_kwargs",
    "thinking": "it is a variable of templates; write it into chat_template_kwargs",
    "thinking_token_budget": "thoughts are not counted",
    "include_reasoning": "thoughts are part of the answer",
    "verbosity": "the length of answers is not steered; ask for it in a message",
    # of other servers
    "grammar": "answers are free text, or JSON (response_format)",
    "regex": "answers are free text, or JSON (response_format)",
    "ebnf": "answers are free text, or JSON (response_format)",
    "n_probs": "is logprobs here, and top_logprobs in chats",
    "do_sample": "temperature 0 is greedy",
    "mirostat": "tokens are chosen by top_k, top_p and min_p",
    "top_a": "tokens are chosen by top_k, top_p and min_p",
    "tfs_z": "tokens are chosen by top_k, top_p and min_p",
    "top_n_sigma": "tokens are chosen by top_k, top_p and min_p",
    "xtc_probability": "tokens are chosen by top_k, top_p and min_p",
    "dry_multiplier": "repetition_penalty is the penalty of repetitions",
    "dynatemp_range": "the temperature is the same for all tokens",
    "samplers": "the order of top_k, top_p and min_p is fixed",
    "watermark": "answers have no watermark",
}
"""Unsupported fields that would change an answer, with the reason. Other unknown fields are ignored."""

RENAMED = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
}
"""Fields of other servers, with their names here; refused unless the field of that name has the same value."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "echo": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "n_predict": (-1,),
    "min_new_tokens": (0,),
    "stop_sequences": ([],),
    "n_probs": (0,),
    "repeat_penalty": (1.0,),
    "mirostat": (0,),
    "top_a": (0.0,),
    "tfs_z": (1.0,),
    "top_n_sigma": (-1.0, 0.0),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "samplers": ([],),
    "watermark": (False,),
}
"""Values of these fields that have no effect, and are accepted; null always is."""

REFUSED_OF_MESSAGES = {
    "tool_calls": "calls of tools are not supported",
    "function_call": "calls of functions are not supported",
    "prefix": "continue_final_message continues the last message",
    "audio": "only text is supported",
    "images": "only text is supported",
}
"""Unsupported fields of a message that would change an answer, with the reason. The chat template gets the others."""

TemplateVariables = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"propertyNames": {"not": {"enum": [*RESERVED_VARIABLES]}}}),
]


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
    content: Text | Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_few)]

    @property
    def text(self) -> str:
        """Concatenated text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatPrompt(BaseModel):
    """Conversation, and how a prompt is made of it."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={
            "not": {
                "required": ["add_generation_prompt", "continue_final_message"],
                "properties": {
                    "add_generation_prompt": {"const": True},
                    "continue_final_message": {"const": True},
                },
            }
        },
    )

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(_few)]
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(Sampling, ChatPrompt):
    """Chat completion request: a conversation to answer."""

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


class TokenizeChat(ChatPrompt):
    """Conversation to tokenize, followed by the start of an answer."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Tokens to convert to text."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: TokenIds
