"""Formats of answers: one table says how thoughts and calls are marked, and which chat template asks for which
marks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from expertmesh.errors import ConfigError
from expertmesh.text import call_syntax as calls
from expertmesh.text.answer_parsers import (
    CallParser,
    HarmonyChannels,
    MarkedParser,
    ThoughtSyntax,
    ThoughtTags,
)
from expertmesh.text.answer_pieces import AnswerParser, PlainParser
from expertmesh.text.call_syntax import CallSyntax, Tools

NONE = "none"
"""Name that stands for no format: all of an answer is content."""
JSON = "json"
"""Name of the format of calls for models that have none of their own."""


class AnswerFormat(NamedTuple):
    """Format of thoughts, of calls, or of both."""

    names: tuple[str, ...]  # its name, and further ones that vLLM has for it
    found: tuple[str, ...]  # texts that a chat template of this format has, all of them; empty: no template shows it
    thoughts: ThoughtSyntax | None = None  # how thoughts are marked; None: no thoughts
    calls: CallSyntax | None = None  # how calls are written; None: no calls
    id_size: int | None = None  # letters and digits that templates want as the id of a call; None: any id will do


@dataclass(frozen=True)
class AnswerReading:
    """Maker of the parsers of answers; alike for requests that are alike."""

    thoughts: AnswerFormat | None = None  # format of thoughts; None: they stay content
    calls: AnswerFormat | None = None  # format of calls; None: they stay content
    tools: Tools = field(default_factory=dict)  # parameters of the tools that may be called, by name
    most: int | None = None  # maximum number of calls; None: any number
    is_open: bool = False  # whether an answer begins within a thought

    def __call__(self) -> AnswerParser:
        """Parser of one answer."""
        thoughts, calls = self.thought_syntax, self.call_syntax
        first = PlainParser() if thoughts is None else thoughts.parser(is_open=self.is_open)
        if calls is None:
            return first
        size = None if self.calls is None else self.calls.id_size
        return MarkedParser(first, CallParser(calls, self.tools, most=self.most, id_size=size))

    @property
    def thought_syntax(self) -> ThoughtSyntax | None:
        """Syntax of thoughts; None: they stay content."""
        return None if self.thoughts is None else self.thoughts.thoughts

    @property
    def call_syntax(self) -> CallSyntax | None:
        """Syntax of calls; None: they stay content, as where no tool may be called."""
        return self.calls.calls if self.tools and self.calls is not None else None

    @property
    def markers(self) -> list[str]:
        """Markers that the parsers need in the text, even if they are special tokens."""
        thoughts, calls = self.thought_syntax, self.call_syntax
        return [
            *(() if thoughts is None else thoughts.markers),
            *(() if calls is None else calls.all_markers),
        ]


_THINK = ThoughtTags("<think>", "</think>")
_MISTRAL = "[TOOL_CALLS]"
_DEEPSEEK = "<｜tool▁calls▁begin｜>"

FORMATS = (
    AnswerFormat(
        ("openai", "openai_gptoss", "gpt_oss"),
        ("<|channel|>", "<|call|>"),
        HarmonyChannels(),
        calls.HARMONY_CALLS,
    ),
    AnswerFormat(("kimi_k2",), ("<|tool_calls_section_begin|>",), calls=calls.KIMI),
    AnswerFormat(("minimax_m2",), ("<minimax:tool_call>",), calls=calls.MINIMAX),
    AnswerFormat(("deepseek_v32",), ("｜DSML｜", "function_calls>"), calls=calls.DEEPSEEK_V32),
    AnswerFormat(("deepseek_v4",), ("｜DSML｜",), calls=calls.DEEPSEEK_V4),
    AnswerFormat(("deepseek_v3",), (_DEEPSEEK, "```json"), calls=calls.DEEPSEEK_V3),
    AnswerFormat(("deepseek_v31",), (_DEEPSEEK,), calls=calls.DEEPSEEK_V31),
    AnswerFormat(("mistral_v11",), (_MISTRAL, "[ARGS]"), None, calls.MISTRAL_V11, 9),
    AnswerFormat(("mistral",), (_MISTRAL,), None, calls.MISTRAL, 9),
    AnswerFormat(("granite",), ("<|tool_call|>",), calls=calls.GRANITE),
    AnswerFormat(("qwen3_coder", "qwen3_xml"), ("<tool_call>", "<function="), calls=calls.QWEN3_CODER),
    AnswerFormat(("glm45", "glm47"), ("<tool_call>", "<arg_key>"), calls=calls.GLM),
    AnswerFormat(("seed_oss",), ("<seed:tool_call>",), calls=calls.SEED),
    AnswerFormat(("minimax", "hunyuan_a13b"), ("<tool_calls>",), calls=calls.TOOL_CALLS),
    AnswerFormat(("nemotron",), ("<TOOLCALL>",), calls=calls.TOOLCALL),
    AnswerFormat(("internlm",), ("<|action_start|>", "<|plugin|>"), calls=calls.INTERNLM),
    AnswerFormat(
        ("cohere_command3",),
        ("<|START_ACTION|>",),
        ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>"),
        calls.COHERE,
    ),
    AnswerFormat(("lfm2",), ("<|tool_call_start|>",), calls=calls.LFM2),
    AnswerFormat(("pythonic", "llama4_pythonic"), ("[func_name1(",), calls=calls.PYTHONIC),
    AnswerFormat(("hermes", "qwen", "granite4"), ("<tool_call>",), calls=calls.HERMES),
    AnswerFormat(
        ("llama3_json", "llama4_json"),
        ('"name": function name', '"parameters": '),
        calls=calls.LLAMA,
    ),
    AnswerFormat((JSON,), (), calls=calls.JSON_CALLS),
    AnswerFormat(("mistral",), ("[THINK]",), ThoughtTags("[THINK]", "[/THINK]")),
    AnswerFormat(("seed_oss",), ("<seed:think>",), ThoughtTags("<seed:think>", "</seed:think>")),
    AnswerFormat(
        ("granite",),
        ("Here is my thought process:",),
        ThoughtTags("Here is my thought process:", "Here is my response:"),
    ),
    AnswerFormat(
        ("deepseek_r1", "qwen3", "glm45", "deepseek_v3", "kimi_k2", "minimax_m2", "hunyuan_a13b"),
        ("<think>",),
        _THINK,
    ),
)
"""All formats; the first one that is found in a template is its format, of thoughts and of calls each."""


_OPTIONS = {"thoughts": "reasoning_parser", "calls": "tool_call_parser"}
"""Options of the server that name a format."""


def _of(kind: str) -> Iterator[AnswerFormat]:
    return (one for one in FORMATS if getattr(one, kind) is not None)


def format_names(kind: str) -> list[str]:
    """Names of all formats of a kind ("thoughts" or "calls"), and `NONE`."""
    return [NONE, *(name for one in _of(kind) for name in one.names)]


def format_of(kind: str, template: str, name: str | None = None) -> AnswerFormat | None:
    """Format of thoughts or calls.

    Args:
        name: name of the format; None: the one that is found in the template.

    Returns:
        None: none, by name or because the template has the marks of none.
    """
    if name is None:
        found = (one for one in _of(kind) if one.found and all(t in template for t in one.found))
        return next(found, None)
    if name == NONE:
        return None
    for one in _of(kind):
        if name in one.names:
            return one
    known = ", ".join(format_names(kind))
    raise ConfigError(_OPTIONS[kind], name, f"must be one of {known}", "choose one")
