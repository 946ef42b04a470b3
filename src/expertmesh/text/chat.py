"""How a conversation becomes tokens, and which of them a model learns: those of the assistant and what ends its turn.

Generation stops at what ends a turn in training: a format says both, the one in `samples`, the other as `ends`.

With a tokenizer that came with a chat template (a converted checkpoint of the hub), the template's text; else our own format:

    <|endoftext|> <|user|> What is 2 + 2? <|endoftext|> <|assistant|> 4. <|endoftext|>

Each message is the mark of its role, its content and the end of text. A tokenizer that is learned from conversations has the marks
as tokens; one that has not writes them as text. docs/decisions/009-conversations.md says why.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from expertmesh.errors import ConfigError, named
from expertmesh.text.tokenizer import end_of_text_id

ROLES = ("system", "user", "assistant", "tool")
MESSAGES = "messages"
NOT_LEARNED = "masked"
"""What a message has whose flag says that it is not learned; in files, torchtune's flag."""

Conversation = dict[str, Any]
"""`messages`, each with a role and a string as content, and `tools` where there are any."""

_QUOTED = "quote a special token of the model"
_NO_TOOLS = f"calls of tools need a chat template that writes them; begin with a converted model that has one ({named('train.init_from')})"
MARKS = tuple(f"<|{role}|>" for role in ROLES)
"""Tokens that begin a message in our own format."""


OWN_TEMPLATE = (
    "<|endoftext|>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Our own format as a chat template, for models that go to the hub."""


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether it is the assistant's and says something, or calls for a tool."""
    return message["role"] == "assistant" and bool(
        message["content"].strip() or message.get("tool_calls")
    )


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer, and no flag says that it is not to be learned."""
    return is_answer(message) and not message.get(NOT_LEARNED)


class TokenSpan(NamedTuple):
    """Neighbouring tokens of a conversation.

    Attributes:
        ids: of the tokens.
        is_learned: whether they are the assistant's, who says something there.
    """

    ids: list[int]
    is_learned: bool


class OwnFormat:
    """Marks of roles, and the end of text after each message.

    Args:
        tokenizer: any with an end of text, that writes special tokens in a text as text.

    Attributes:
        identity: of all that the tokens depend on beside the tokenizer.
        source: the same as a chat template.
        ends: tokens with which an answer ends, never none.
    """

    identity = "own 1"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text_id(tokenizer)
        self.source = OWN_TEMPLATE
        self.ends: tuple[int, ...] = (self._end,)

    def problem(self, conversation: Conversation) -> str | None:
        """Why a conversation cannot be written without a lie, in the plural; None: whatever a message says is text."""
        return None

    def samples(self, conversation: Conversation) -> list[list[TokenSpan]]:
        """Token sequences to learn from: one.

        Raises:
            ConfigError: it calls tools.
        """
        _check_tools(self, conversation)
        pieces = [TokenSpan([self._end], False)]
        for message in conversation[MESSAGES]:
            pieces.append(TokenSpan(self._mark(message["role"]), False))
            ids = [*self._encode(message["content"]), self._end]
            pieces.append(TokenSpan(ids, is_learned(message)))
        return [pieces]

    def writes(self, field: str) -> bool:
        """Whether a field of a message beside its role and content is written."""
        return False

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """What a model is given to answer as the assistant: the messages and its mark.

        Raises:
            ConfigError: they call tools.
        """
        (pieces,) = self.samples({MESSAGES: messages})
        return [i for piece in pieces for i in piece.ids] + self._mark("assistant")

    def _mark(self, role: str) -> list[int]:
        found = self._tokenizer.token_to_id(f"<|{role}|>")
        return self._encode(f"<|{role}|>") if found is None else [found]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class TemplateFormat:
    """A chat template of the hub, rendered in jinja2's sandbox.

    The text up to an assistant's turn is what the template gives for the messages before it with its prompt for an answer, so
    that a model learns what it is asked for later. Where a template writes earlier turns otherwise than the last one (models
    that leave their thoughts out), each turn of the assistant is a sequence of its own.

    An answer ends in the special token that the template writes behind it. Where it writes none (GLM-4-MoE), the special token
    that begins the next turn is learned as the end, and behind the last answer of a sequence the end of text; where the next turn
    begins in plain text, each answer is a sequence of its own.

    Args:
        tokenizer: of the model.
        template: Jinja's source.
        variables: names such as bos_token that the template may use.

    Attributes:
        identity: of all that the tokens depend on beside the tokenizer.
        source: the template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str]) -> None:
        self._given = tokenizer
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False
        self.source, self._variables = template, dict(variables)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def identity(self) -> str:
        """Of template and variables."""
        told = json.dumps([self.source, self._variables], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()
        # of templates that write an end behind every answer the tokens never changed: the caches of old runs are theirs
        more = (" ends", any(self._ends.values())), (" header", self._header)
        return f"template {digest}" + "".join(text for text, is_so in more if is_so)

    @cached_property
    def _template(self) -> Any:
        from expertmesh.text.chat_template import compiled

        return compiled(self.source)

    @cached_property
    def _header(self) -> str:
        """What a template that ignores `add_generation_prompt` writes before an answer: a prompt for it, which is not learned.

        "": the template asks by itself, or an answer follows with nothing but blanks before it (Mistral).
        """
        for talk in ([_ASKED], [_SYSTEM, _ASKED]):
            try:
                plain, asked = (self._render_as_it_is(talk, None, asks=a) for a in (False, True))
                whole = self._render_as_it_is([*talk, {**_ANSWER, "content": _PROBE}], None)
            except ConfigError:
                continue
            if asked == plain and whole.startswith(plain):
                header, found, _ = whole[len(plain) :].partition(_PROBE)
                return header if found and header.strip() else ""
        return ""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer in `samples`, whatever comes next; never none."""
        return tuple(self._ends) or (self._end,)

    @cached_property
    def _ends(self) -> dict[int, bool]:
        """Those of a few conversations, and whether the template leaves an answer open that is closed by it."""
        calls = [(_ASKED, _CALL)] if self.writes("tool_calls") else []
        found: dict[int, bool] = {}
        for talk in ((_ASKED, _ANSWER), (_SYSTEM, _ASKED, _ANSWER), *calls):
            for following in ((), (_ASKED,), (_TOOL,)):
                for token, is_open in self._ends_of([*talk], [*following]):
                    found[token] = is_open or found.get(token, False)
        return found

    def _ends_of(
        self, talk: list[dict[str, Any]], following: list[dict[str, Any]]
    ) -> list[tuple[int, bool]]:
        """What ends the last answer of a conversation that goes on in this way; nothing where the template refuses it."""
        try:
            (answer,) = self._answers({MESSAGES: talk}, [len(talk) - 1])
            whole = self._render([*talk, *following], None)
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
        """Whether the template names a field of messages."""
        return field in self.source

    def problem(self, conversation: Conversation) -> str | None:
        """Whether anything in it quotes a special token, which the template would write as that token."""
        return None if self._quoted(conversation) is None else _QUOTED

    def samples(self, conversation: Conversation) -> list[list[TokenSpan]]:
        """Token sequences to learn from: one, or one for each turn.

        Raises:
            ConfigError: the template refuses the conversation, does not continue its own prompt, or writes no calls of tools.
        """
        _check_tools(self, conversation)
        turns = [i for i, message in enumerate(conversation[MESSAGES]) if is_learned(message)]
        answers = self._answers(conversation, turns)
        if not answers:
            return []
        whole = answers[-1].until
        is_one = all(whole.startswith(text) for one in answers for text in (one.before, one.until))
        # a next turn that begins in plain text, or of a role that never follows, gives an answer no end
        is_one &= all(
            self._last_special(one.text)
            or self._special.get(self._first_special(whole[len(one.until) :]) or "") in self.ends
            for one in answers[:-1]
        )
        return [self._pieces(answers)] if is_one else [self._pieces([one]) for one in answers]

    def _answers(self, conversation: Conversation, turns: list[int]) -> list["_ParsedAnswer"]:
        """The text of these turns."""
        messages, tools = conversation[MESSAGES], conversation.get("tools")
        found = []
        for i in turns:
            before = self._render(messages[:i], tools, asks=True)
            until = self._render(messages[: i + 1], tools)
            if not until.startswith(before):
                raise ConfigError(
                    "the chat template writes an answer otherwise than as a continuation of its own prompt; use another template"
                )
            found.append(_ParsedAnswer(before, until))
        return found

    def _last_special(self, text: str) -> str | None:
        """The special token that ends a text, but for blanks."""
        bare = text.rstrip()
        return max((t for t in self._special if bare.endswith(t)), key=len, default=None)

    def _first_special(self, text: str) -> str | None:
        """The special token that begins a text, but for blanks."""
        bare = text.lstrip()
        return max((t for t in self._special if bare.startswith(t)), key=len, default=None)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """The template's prompt.

        Raises:
            ConfigError: a message quotes a special token, so that it would end what is said, or the template refuses it.
        """
        if (token := self._quoted(messages)) is not None:
            raise ConfigError(
                f"prompt: quotes {token}, a special token of the model, which is no text to it; leave it out"
            )
        return self._encode(self._render(messages, None, asks=True))

    def _quoted(self, values: Any) -> str | None:
        """A special token that a string in JSON values quotes."""
        texts = list(_strings(values))
        return next((t for t in self._special if any(t in text for text in texts)), None)

    def _pieces(self, answers: list["_ParsedAnswer"]) -> list[TokenSpan]:
        """The text of a sequence, cut at its answers; what is only blank behind the token that ends one is not learned."""
        text, pieces, at, is_open = answers[-1].until, [], 0, False
        for answer in answers:
            pieces += self._between(text[at : len(answer.before)], ends_answer=is_open)
            is_open = self._last_special(answer.text) is None
            at = len(answer.until if is_open else answer.until.rstrip())
            pieces.append(TokenSpan(self._encode(text[len(answer.before) : at]), True))
        if is_open:
            pieces.append(TokenSpan([self._end], True))
        pieces += self._between(text[at:], ends_answer=False)
        return [piece for piece in pieces if piece.ids]

    def _between(self, text: str, *, ends_answer: bool) -> list[TokenSpan]:
        """What stands before an answer; up to its first special token it is learned where that ends the answer before."""
        ids = self._encode(text)
        special = set(self._special.values())
        count = 1 + next(i for i, token in enumerate(ids) if token in special) if ends_answer else 0
        return [TokenSpan(ids[:count], True), TokenSpan(ids[count:], False)]

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, asks: bool = False) -> str:
        text = self._render_as_it_is(messages, tools, asks=asks)
        return text + self._header if asks else text

    def _render_as_it_is(
        self, messages: list[dict[str, Any]], tools: Any, *, asks: bool = False
    ) -> str:
        from jinja2 import TemplateError

        said = [{k: v for k, v in message.items() if k != NOT_LEARNED} for message in messages]
        try:
            text: str = self._template.render(
                messages=said, tools=tools, add_generation_prompt=asks, **self._variables
            )
        except (TemplateError, *_FAILURES) as error:
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ConfigError(f"the model's chat template refuses it ({reason})") from None
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class _ParsedAnswer(NamedTuple):
    """The text before an answer with the prompt for it, and the text up to its end."""

    before: str
    until: str

    @property
    def text(self) -> str:
        return self.until[len(self.before) :]


_ASKED, _ANSWER, _SYSTEM, _TOOL = (
    {"role": role, "content": "a"} for role in ("user", "assistant", "system", "tool")
)
_PROBE = "8d1f answer"
_CALL = {
    **_ANSWER,
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
"""Messages by which a template shows what it writes behind an answer."""

_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,  # and RecursionError
    MemoryError,
)
"""What the program of a template may raise beside jinja2's own."""


ChatFormat = OwnFormat | TemplateFormat
"""How conversations are written."""


def _check_tools(form: ChatFormat, conversation: Conversation) -> None:
    """Raise ConfigError where a conversation calls tools, or has them, and the format does not write that."""
    has_calls = any(m.get("tool_calls") for m in conversation[MESSAGES])
    if (has_calls and not form.writes("tool_calls")) or (
        "tools" in conversation and not form.writes("tools")
    ):
        raise ConfigError(_NO_TOOLS)


def latest_turns(
    form: ChatFormat, messages: list[dict[str, Any]], *, most: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """The end of a conversation that a model has room for, and its prompt.

    Args:
        form: of the conversation.
        messages: turns of the user and the assistant, one after the other; the last one, the user's, stays however long it is.
        most: tokens that there is room for.

    Raises:
        ConfigError: see `prompt`.
    """
    for first in range(0, len(messages), 2):
        ids = form.prompt(messages[first:])
        if len(ids) <= most:
            break
    return messages[first:], ids


def _strings(values: Any) -> Iterator[str]:
    """All strings in JSON values, keys included."""
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
