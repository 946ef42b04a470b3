"""How a conversation becomes tokens, and which of them a model learns: those of the assistant and what ends its turn.

With a tokenizer that came with a chat template (a converted checkpoint of the hub), the template's text; else our own format:

    <|endoftext|> <|user|> What is 2 + 2? <|endoftext|> <|assistant|> 4. <|endoftext|>

Each message is the mark of its role, its content and the end of text. A tokenizer that is learned from conversations has the marks
as tokens; one that has not writes them as text. docs/decisions/009-conversations.md says why.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from expertmesh.config.base import parse_json
from expertmesh.data.conversation_lines import MESSAGES, ROLES, Conversation, is_answer
from expertmesh.data.tokenizer import end_of_text_id
from expertmesh.errors import ConfigError, named

_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_QUOTED = "quote a special token of the model"
EXTRAS = "hub"
"""Folder of a run directory that came from the hub, with the files that are no weights."""
MARKS = tuple(f"<|{role}|>" for role in ROLES)
"""Tokens that begin a message in our own format."""


OWN_TEMPLATE = (
    "<|endoftext|>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Our own format as a chat template, for models that go to the hub."""


class Piece(NamedTuple):
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
        ends: tokens with which an answer ends; none where it ends in plain text.
    """

    identity = "own 1"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text_id(tokenizer)
        self.ends: tuple[int, ...] = (self._end,)

    def problem(self, conversation: Conversation) -> str | None:
        """Why a conversation cannot be written without a lie, in the plural; None: whatever a message says is text."""
        return None

    def samples(self, conversation: Conversation) -> list[list[Piece]]:
        """Token sequences to learn from: one.

        Raises:
            ConfigError: it calls tools.
        """
        if "tools" in conversation or any(m.get("tool_calls") for m in conversation[MESSAGES]):
            raise ConfigError(
                f"calls of tools need the chat template of a converted model; begin with one ({named('train.init_from')})"
            )
        pieces = [Piece([self._end], False)]
        for message in conversation[MESSAGES]:
            pieces.append(Piece(self._mark(message["role"]), False))
            ids = [*self._encode(message["content"]), self._end]
            pieces.append(Piece(ids, is_answer(message)))
        return [pieces]

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

    Args:
        tokenizer: of the model.
        template: Jinja's source.
        variables: names such as bos_token that the template may use.

    Attributes:
        identity: of all that the tokens depend on beside the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str]) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False
        self._source, self._variables = template, dict(variables)
        self._special = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        told = json.dumps([template, self._variables], sort_keys=True)
        self.identity = f"template {hashlib.sha256(told.encode()).hexdigest()}"

    @cached_property
    def _template(self) -> Any:
        from expertmesh.data.chat_template import compiled

        return compiled(self._source)

    @property
    def ends(self) -> tuple[int, ...]:
        """The special token behind an answer, which need not be the end of a text."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            pieces = self.samples({MESSAGES: talk})[-1]
        except ConfigError:
            return ()
        last = next((piece.ids[-1] for piece in reversed(pieces) if piece.is_learned), None)
        is_special = last is not None and self._tokenizer.id_to_token(last) in self._special
        return (last,) if last is not None and is_special else ()

    def problem(self, conversation: Conversation) -> str | None:
        """Whether anything in it quotes a special token, which the template would write as that token."""
        return None if self._quoted(conversation) is None else _QUOTED

    def samples(self, conversation: Conversation) -> list[list[Piece]]:
        """Token sequences to learn from: one, or one for each turn.

        Raises:
            ConfigError: the template refuses the conversation, or does not continue its own prompt.
        """
        messages, tools = conversation[MESSAGES], conversation.get("tools")
        turns = [i for i, message in enumerate(messages) if is_answer(message)]
        bounds = []
        for i in turns:
            before = self._render(messages[:i], tools, asks=True)
            after = self._render(messages[: i + 1], tools)
            if not after.startswith(before):
                raise ConfigError(
                    "the chat template writes an answer otherwise than as a continuation of its own prompt; use another template"
                )
            bounds.append((before, after))
        if not bounds:
            return []
        whole = bounds[-1][1]
        if all(whole.startswith(text) for pair in bounds for text in pair):
            ends = [(len(before), len(after)) for before, after in bounds]
            return [self._pieces(whole, ends)]
        return [self._pieces(after, [(len(before), len(after))]) for before, after in bounds]

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

    def _pieces(self, text: str, answers: list[tuple[int, int]]) -> list[Piece]:
        """The text, cut at the answers; what is only blank behind the token that ends one is not learned."""
        pieces, at = [], 0
        for start, stop in answers:
            answer = text[start:stop]
            bare = answer.rstrip()
            end = start + len(bare if bare.endswith(tuple(self._special)) else answer)
            pieces += [(text[at:start], False), (text[start:end], True)]
            at = end
        pieces.append((text[at:], False))
        return [Piece(self._encode(part), learned) for part, learned in pieces if part]

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, asks: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=asks, **self._variables
            )
        except (TemplateError, *_FAILURES) as error:
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ConfigError(f"the model's chat template refuses it ({reason})") from None
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


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


def find_format(tokenizer: Tokenizer, path: Path | None) -> ChatFormat:
    """The format of a tokenizer.

    Args:
        tokenizer: the tokenizer.
        path: its file; a chat template lies beside it or in the folder `hub` there. None: it has just been learned.

    Raises:
        ConfigError: the files beside it are damaged.
    """
    found = None if path is None else _find_template(path)
    return OwnFormat(tokenizer) if found is None else TemplateFormat(tokenizer, *found[1:])


def extras_of(tokenizer_path: str | Path | None) -> dict[str, Path]:
    """Files that a run keeps of the place where its tokenizer came from, by their names there.

    Those of a converted model, and those that `find_format` read, so that it finds the same format beside the run's copy.

    Args:
        tokenizer_path: tokenizer.json of a run, or of a folder of the hub; None: there is none.

    Raises:
        ConfigError: the files beside it are damaged.
    """
    if tokenizer_path is None:
        return {}
    folder = Path(tokenizer_path).parent / EXTRAS
    found = {path.name: path for path in (sorted(folder.iterdir()) if folder.is_dir() else [])}
    if (template := _find_template(Path(tokenizer_path))) is not None:
        for name in (_CONFIG, _TEMPLATE):  # these two belong together
            found.pop(name, None)
            found[name] = template.folder / name
    return {f"{EXTRAS}/{name}": path for name, path in found.items() if path.is_file()}


class _Template(NamedTuple):
    folder: Path
    source: str
    variables: dict[str, str]


def _find_template(path: Path) -> _Template | None:
    """The chat template of a tokenizer's file."""
    for folder in (path.parent / EXTRAS, path.parent):
        values = _json(folder / _CONFIG)
        source = values.get("chat_template")
        if (folder / _TEMPLATE).is_file():
            try:
                source = (folder / _TEMPLATE).read_text(encoding="utf-8")
            except UnicodeError:
                raise ConfigError(
                    f"{folder / _TEMPLATE}: is no UTF-8 text; restore it from the hub"
                ) from None
        if isinstance(source, list):
            named = {
                one.get("name"): one.get("template") for one in source if isinstance(one, dict)
            }
            source = named.get("default")
        if isinstance(source, str):
            return _Template(folder, source, _special_tokens(values))
    return None


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


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = parse_json(path.read_bytes())
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is no JSON object; restore it from the hub")
    return values
