"""Chat formats: conversations as tokens, with the tokens that a model learns (the assistant's turns and their end
tokens).

A format gives training samples by `samples` and the stop tokens of generation as `ends`, so that generation stops at
the tokens that end a turn in training.

A tokenizer with a chat template (from a converted checkpoint of the hub) uses the template. All others use our own
format:

    <|endoftext|> <|user|> What is 2 + 2? <|endoftext|> <|assistant|> 4. <|endoftext|>

Each message is the mark of its role, its content and the end of text. A tokenizer learned from conversations has the
marks as special tokens; any other tokenizer encodes them as text. docs/decisions/009-conversations.md says why.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from expertmesh.errors import ConfigError, named
from expertmesh.text.answer_formats import format_of
from expertmesh.text.chat_template import variables_of
from expertmesh.text.limits import TextLimitError, TokenBound
from expertmesh.text.messages import ROLES, strings_of
from expertmesh.text.template_messages import CallForm, best_form, for_template, forms_of, with_fitting
from expertmesh.text.template_process import render
from expertmesh.text.tokenizer import end_of_text_id, ids_of_text

MESSAGES = "messages"
NOT_LEARNED = "masked"
"""Key of the flag that excludes a message from learning; torchtune's name for it in files."""

Conversation = dict[str, Any]
"""`messages`, each with a role and a string as content, and `tools` where there are any."""

RESERVED_VARIABLES = (
    MESSAGES,
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
"""Names that further variables of a template may not have: arguments of a prompt set them, or nothing does."""

_QUOTED = "quote a special token of the model"
_NO_TOOLS = (
    "calls of tools need a chat template that writes them; begin with a converted model that has one "
    f"({named('train.init_from')})"
)
MARKS = tuple(f"<|{role}|>" for role in ROLES)
"""Tokens that begin a message in our own format."""


OWN_TEMPLATE_FILE = Path(__file__).with_name("own_format.jinja")
OWN_TEMPLATE = OWN_TEMPLATE_FILE.read_text(encoding="utf-8")
"""Our own format as a chat template: for models that go to the hub, and for runs whose tokenizer has no marks."""


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message is the assistant's and has content or tool calls."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer and is not masked."""
    return is_answer(message) and not message.get(NOT_LEARNED)


class TokenSpan(NamedTuple):
    """Neighbouring tokens of a conversation."""

    ids: list[int]
    is_learned: bool  # whether the loss includes them: they are an answer of the assistant or its end token


class OwnFormat:
    """Our own chat format: the mark of the role, the content and the end of text for each message.

    Args:
        tokenizer: has an end of text, and encodes special tokens that occur in a text as plain text.
        is_template: whether the files beside the tokenizer have the format as their chat template.
    """

    identity = "own 1"  # key of everything that the tokens depend on, except the tokenizer

    def __init__(self, tokenizer: Tokenizer, *, is_template: bool = False) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text_id(tokenizer)
        self._is_template = is_template
        self._bound = TokenBound(tokenizer)
        self.source = OWN_TEMPLATE  # the format as a chat template
        self.ends: tuple[int, ...] = (self._end,)  # tokens that end an answer; never empty

    @property
    def has_marks(self) -> bool:
        """Whether the tokenizer has a token for each role, as one that was learned from conversations has."""
        return all(self._tokenizer.token_to_id(mark) is not None for mark in MARKS)

    @property
    def is_known(self) -> bool:
        """Whether the model has learned the format: a file says so, or the tokenizer, which has the marks."""
        return self._is_template or self.has_marks

    def problem(self, conversation: Conversation) -> str | None:
        """Reason to refuse a conversation, as a predicate in the plural. Always None: any content is encoded as
        text."""
        return None

    def samples(self, conversation: Conversation) -> list[list[TokenSpan]]:
        """Token sequences to learn from: always one."""
        _check_tools(self, conversation)
        spans = [TokenSpan([self._end], False)]
        for message in conversation[MESSAGES]:
            spans.append(TokenSpan(self._mark(message["role"]), False))
            ids = [*ids_of_text(self._tokenizer, message["content"]), self._end]
            spans.append(TokenSpan(ids, is_learned(message)))
        return [spans]

    def writes(self, field: str) -> bool:
        """Whether a field of messages is written besides role and content."""
        return False

    @property
    def variables(self) -> frozenset[str]:
        """Variables that the format reads: none that a request has."""
        return frozenset()

    def prompt(
        self,
        messages: list[dict[str, Any]],  # the conversation
        *,
        tools: list[dict[str, Any]] | None = None,  # tools that may be called, which this format does not write
        asks: bool = True,  # whether the assistant's mark follows the messages; ignored with `continues`
        continues: bool = False,  # whether the last message stays open, so that the answer continues its text
        variables: Mapping[str, Any] = MappingProxyType({}),
        window: int | None = None,  # maximum tokens of the model; None: any number
    ) -> list[int]:
        """Prompt for an answer of the assistant: the messages, then the assistant's mark."""
        self._bound.check("\n".join(message["content"] for message in messages), window)
        (spans,) = self.samples({MESSAGES: messages})
        ids = [i for span in spans for i in span.ids]
        if continues:
            return ids[:-1]
        return ids + self._mark("assistant") if asks else ids

    def _mark(self, role: str) -> list[int]:
        found = self._tokenizer.token_to_id(f"<|{role}|>")
        return ids_of_text(self._tokenizer, f"<|{role}|>") if found is None else [found]


class TemplateFormat:
    """Chat format given by a chat template of the hub, rendered in jinja2's sandbox.

    The text before an assistant's turn is the template's output for the earlier messages with its generation prompt, so
    that training and generation see the same prompt. If a template writes earlier turns differently from the last one
    (models that drop their reasoning), each turn of the assistant becomes a sequence of its own.

    An answer ends in the special token that the template writes behind it. If the template writes none (GLM-4-MoE), the
    special token that begins the next turn is learned as the end, and the end of text behind the last answer of a
    sequence. If the next turn begins in plain text, each answer becomes a sequence of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,  # the model's tokenizer
        template: str,  # source of the Jinja template
        variables: Mapping[str, str],  # variables such as bos_token that the template may use
        *,
        with_tools: str | None = None,  # source of the template for conversations with tools; None: the same
        unset: Collection[str] | None = None,  # see `chat_template.rendered`
        splits_special: bool = False,  # whether special tokens that the template writes are encoded as text
    ) -> None:
        self._given = tokenizer
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = splits_special
        self._bound = TokenBound(self._tokenizer)
        self.source, self._variables = template, dict(variables)
        self._with_tools, self._unset = with_tools, unset
        added = tokenizer.get_added_tokens_decoder()
        named = set(self._variables.values())  # of a tokenizer that was not read beside its files
        self._special = {token.content: i for i, token in added.items() if token.special or token.content in named}

    @cached_property
    def identity(self) -> str:
        """Digest of the template and its variables."""
        told = json.dumps([self.source, self._variables], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()
        # templates that end every answer themselves keep the plain digest, so that token caches of old runs stay valid
        more = (
            (" ends", any(self._ends.values())),
            (" header", self._header),
            (f" tools {self._with_tools}", self._with_tools),
        )
        return f"template {digest}" + "".join(text for text, is_so in more if is_so)

    @cached_property
    def _header(self) -> str:
        """Generation prompt of a template that ignores `add_generation_prompt`: the text that it writes before an
        answer.

        "": the template handles `add_generation_prompt`, or writes only blanks before an answer (Mistral).
        """
        for talk in ([_ASKED], [_SYSTEM, _ASKED]):
            try:
                plain, asked = (self._render_as_it_is(talk, None, asks=a) for a in (False, True))
                whole = self._render_as_it_is([*talk, {**_ANSWER, "content": _PROBE}], None)
            except TextLimitError:
                raise
            except ConfigError:
                continue
            if asked == plain and whole.startswith(plain):
                header, found, _ = whole[len(plain) :].partition(_PROBE)
                return header if found and header.strip() else ""
        return ""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer in `samples`, whatever follows it; never empty."""
        return tuple(self._ends) or (self._end,)

    @cached_property
    def _ends(self) -> dict[int, bool]:
        """End tokens found by probe conversations, each with whether it closes answers that the template leaves
        open."""
        calls = [(_ASKED, _CALL)] if self.writes("tool_calls") else []
        found: dict[int, bool] = {}
        for talk in ((_ASKED, _ANSWER), (_SYSTEM, _ASKED, _ANSWER), *calls):
            for following in ((), (_ASKED,), (_TOOL,)):
                for token, is_open in self._ends_of([*talk], [*following]):
                    found[token] = is_open or found.get(token, False)
        return found

    def _ends_of(self, talk: list[dict[str, Any]], following: list[dict[str, Any]]) -> list[tuple[int, bool]]:
        """End token of the last answer of `talk` if `following` comes next, and whether the template left the answer
        open.

        Empty if the template refuses the conversation.
        """
        try:
            (answer,) = self._answers({MESSAGES: talk}, [len(talk) - 1])
            whole = self._render([*talk, *following], None)
        except TextLimitError:
            raise
        except ConfigError:
            return []
        token = self._last_special(answer.text)
        if token is not None:
            return [(self._special[token], False)]
        if following and whole.startswith(answer.until):
            token = self._first_special(whole[len(answer.until) :])
        return [(self._end if token is None else self._special[token], True)]

    @property
    def _end(self) -> int:
        return end_of_text_id(self._given)

    def writes(self, field: str) -> bool:
        """Whether the template names a field of messages, or a variable."""
        return _names(self._sources, field)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads."""
        return variables_of(self._sources)

    @cached_property
    def _sources(self) -> str:
        """Sources of the template, and of the one for tools."""
        return f"{self.source}\n{self._with_tools or ''}"

    def problem(self, conversation: Conversation) -> str | None:
        """Reason to refuse a conversation that quotes a special token, which would be encoded as that token; else
        None."""
        return None if self._quoted(conversation) is None else _QUOTED

    def samples(self, conversation: Conversation) -> list[list[TokenSpan]]:
        """Token sequences to learn from: one, or one for each turn."""
        _check_tools(self, conversation)
        turns = [i for i, message in enumerate(conversation[MESSAGES]) if is_learned(message)]
        answers = self._answers(conversation, turns)
        if not answers:
            return []
        whole = answers[-1].until
        is_one = all(whole.startswith(text) for one in answers for text in (one.before, one.until))
        # an answer has no end if the next turn begins in plain text, or with a token that is none of the ends
        is_one &= all(
            self._last_special(one.text)
            or self._special.get(self._first_special(whole[len(one.until) :]) or "") in self.ends
            for one in answers[:-1]
        )
        return [self._spans(answers)] if is_one else [self._spans([one]) for one in answers]

    def _answers(self, conversation: Conversation, turns: list[int]) -> list["_ParsedAnswer"]:
        """The answers at these indices of the messages, each with the text before it."""
        messages, tools = conversation[MESSAGES], conversation.get("tools")
        found = []
        for i in turns:
            before = self._render(messages[:i], tools, asks=True)
            until = self._render(messages[: i + 1], tools)
            if not until.startswith(before):
                raise ConfigError(
                    "the chat template writes an answer otherwise than as a continuation of its own prompt; use "
                    "another template"
                )
            found.append(_ParsedAnswer(before, until))
        return found

    def _last_special(self, text: str) -> str | None:
        """The special token that ends a text, blanks aside."""
        bare = text.rstrip()
        return max((t for t in self._special if bare.endswith(t)), key=len, default=None)

    def _first_special(self, text: str) -> str | None:
        """The special token that begins a text, blanks aside."""
        bare = text.lstrip()
        return max((t for t in self._special if bare.startswith(t)), key=len, default=None)

    def prompt(
        self,
        messages: list[dict[str, Any]],  # the conversation
        *,
        tools: list[dict[str, Any]] | None = None,  # tools that may be called; None: none
        asks: bool = True,  # whether the template's generation prompt follows the messages; ignored with `continues`
        continues: bool = False,  # whether the last message stays open, so that the answer continues its text
        variables: Mapping[str, Any] = MappingProxyType({}),
        window: int | None = None,  # maximum tokens of the model; None: any number
    ) -> list[int]:
        """Prompt for an answer of the assistant."""
        messages = [*map(self._with_calls, messages)]
        most = self._bound.most_characters(window)
        most = None if most is None else most + len(_OPEN_END)  # which is cut off again
        wish = {"variables": variables, "most": most}
        text = self._open(messages, tools, wish) if continues else self._render(messages, tools, asks=asks, **wish)
        self._bound.check(text, window)
        if (token := self._quoted([messages, tools, dict(variables)])) is not None:
            raise ConfigError(
                f"prompt: quotes {token}, a special token of the model, which is no text to it; leave it out"
            )
        return ids_of_text(self._tokenizer, text)

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose calls, and ids of calls, are as the template reads them."""
        size = self._id_size
        if message.get("tool_calls"):
            return best_form(self._call_forms, message).of(message, size)
        return with_fitting(message, "tool_call_id", size)

    @cached_property
    def _id_size(self) -> int | None:
        found = format_of("calls", self._sources)
        return None if found is None else found.id_size

    @cached_property
    def _call_forms(self) -> list[CallForm]:
        return forms_of(lambda messages: self._render_as_it_is(messages, None))

    def _open(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        wish: Mapping[str, Any],
    ) -> str:
        """Text of the messages up to the end of the last content, as transformers' `continue_final_message` cuts it."""
        *before, last = messages
        last = {**last, "content": last["content"] or ""}
        text = self._render([*before, {**last, "content": last["content"] + _OPEN_END}], tools, **wish)
        written, mark, rest = text.rpartition(_OPEN_END.strip())
        if not mark or last["content"].strip() not in written:
            raise ConfigError(
                "the chat template does not write the text of the last message as it is, so that nothing can continue "
                "it; ask for"
                " an answer"
            )
        # a template that trims the blank of the mark would have trimmed those of the content
        return written if rest.startswith(" ") else written.rstrip()

    def _quoted(self, values: Any) -> str | None:
        """A special token that occurs in a string of JSON values; None: none does."""
        texts = list(strings_of(values))
        return next((t for t in self._special if any(t in text for text in texts)), None)

    def _spans(self, answers: list["_ParsedAnswer"]) -> list[TokenSpan]:
        """Token spans of one sequence, cut at its answers; blanks behind an end token are not learned."""
        text, spans, at, is_open = answers[-1].until, [], 0, False
        for answer in answers:
            spans += self._between(text[at : len(answer.before)], ends_answer=is_open)
            is_open = self._last_special(answer.text) is None
            at = len(answer.until if is_open else answer.until.rstrip())
            spans.append(TokenSpan(ids_of_text(self._tokenizer, text[len(answer.before) : at]), True))
        if is_open:
            spans.append(TokenSpan([self._end], True))
        spans += self._between(text[at:], ends_answer=False)
        return [span for span in spans if span.ids]

    def _between(self, text: str, *, ends_answer: bool) -> list[TokenSpan]:
        """Spans of the text before an answer. If `ends_answer`, its first special token ends the last answer and is
        learned."""
        ids = ids_of_text(self._tokenizer, text)
        special = set(self._special.values())
        count = 1 + next(i for i, token in enumerate(ids) if token in special) if ends_answer else 0
        return [TokenSpan(ids[:count], True), TokenSpan(ids[count:], False)]

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, asks: bool = False, **more: Any) -> str:
        text = self._render_as_it_is(messages, tools, asks=asks, **more)
        return text + self._header if asks else text

    def _render_as_it_is(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        *,
        asks: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        most: int | None = None,
    ) -> str:
        """Text of the template, of at most `most` characters, with the arguments that transformers gives it."""
        source = self.source if tools is None else self._with_tools or self.source
        said = [for_template({k: v for k, v in m.items() if k != NOT_LEARNED}) for m in messages]
        own = {MESSAGES: said, "tools": tools, "add_generation_prompt": asks}
        given = {**_NOTHING, **self._variables, **variables, **own}
        return render(source, given, unset=self._unset, most_characters=most)


@lru_cache  # every request and every conversation of a data set asks for the same few
def _names(source: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


class _ParsedAnswer(NamedTuple):
    """Rendered text of an answer."""

    before: str  # text before the answer, with the generation prompt
    until: str  # text up to the end of the answer

    @property
    def text(self) -> str:
        return self.until[len(self.before) :]


_ASKED, _ANSWER, _SYSTEM, _TOOL = ({"role": role, "content": "a"} for role in ("user", "assistant", "system", "tool"))
_NOTHING = {"documents": None}
"""Variables of a template unless they are given."""
_PROBE = "8d1f answer"
_OPEN_END = "8d1f open end "
"""Mark behind the text that is to be continued; its blank shows whether the template trims what it writes."""
_CALL = {
    **_ANSWER,
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
"""Probe messages that show the end tokens of a template's answers."""

ChatFormat = OwnFormat | TemplateFormat
"""Format of conversations: our own or a chat template."""


def _check_tools(form: ChatFormat, conversation: Conversation) -> None:
    """Raise ConfigError if a conversation has tools or tool calls and the format cannot write them."""
    has_calls = any(m.get("tool_calls") for m in conversation[MESSAGES])
    if (has_calls and not form.writes("tool_calls")) or ("tools" in conversation and not form.writes("tools")):
        raise ConfigError(_NO_TOOLS)


def latest_turns(
    form: ChatFormat,
    messages: list[dict[str, Any]],
    *,
    most: int,  # maximum tokens of the prompt
    window: int,  # maximum tokens of the model
    variables: Mapping[str, Any] = MappingProxyType({}),  # further variables of a chat template
) -> tuple[list[dict[str, Any]], list[int]]:
    """Latest messages of a conversation that fit into a number of tokens, and their prompt."""
    for first in range(0, len(messages), 2):
        kept = messages[first:]
        try:
            ids = form.prompt(kept, variables=variables, window=window)
        except TextLimitError:
            if len(kept) == 1:
                raise
            continue
        if len(ids) <= most:
            break
    return messages[first:], ids
