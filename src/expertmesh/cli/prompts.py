"""Prompts of `expertmesh generate`: words of the command line, lines or objects of a file, standard input."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expertmesh.cli.terminal_progress import tell
from expertmesh.config.base import expanded, parse_json
from expertmesh.config.values import shown
from expertmesh.data.encoding import NotTextError, decoded, encoding_of, remedy
from expertmesh.data.files import TextFile, lines_of
from expertmesh.errors import ConfigError, text_of

if TYPE_CHECKING:
    from expertmesh.text.chat import ChatFormat

Asked = str | list[dict[str, Any]]
"""Prompt: a text, or the messages of a conversation."""


class Prompt(NamedTuple):
    """Prompt and its place."""

    asked: Asked
    where: str = ""  # its place in messages, such as a line of a file; "": it is the only one


def variables_of(typed: str | None) -> dict[str, Any]:
    """Variables of a chat template, from the JSON object typed after --chat-template-kwargs."""
    if typed is None:
        return {}
    from expertmesh.text.chat import RESERVED_VARIABLES
    from expertmesh.text.messages import is_unicode

    try:
        found = parse_json(typed)
    except ValueError:
        found = None
    lead = f"--chat-template-kwargs {shown(typed)}"
    if not isinstance(found, dict) or not is_unicode(found):
        raise ConfigError(
            f"{lead}: must be a JSON object of the template's variables; write one such as '{{\"enable_thinking\": "
            f"false}}'"
        )
    if wrong := [name for name in RESERVED_VARIABLES if name in found]:
        raise ConfigError(f"{lead}: may not have {wrong[0]}; leave it out")
    return found


def check_variables_read(variables: dict[str, Any], form: "ChatFormat") -> None:
    """Raise ConfigError if a conversation's format does not read one of the variables."""
    for name in variables:
        if not form.writes(name):
            raise ConfigError(
                f"--chat-template-kwargs: the model's format of conversations does not read {shown(name)}; leave it out"
            )


def _asked_in(path: Path) -> list[Prompt]:
    """Prompts of a file, packed or not: its lines, or the JSON objects in it."""
    from expertmesh.data.formats import ending_of
    from expertmesh.data.json_records import JSON, entries_of
    from expertmesh.data.records import NoRecordsError

    ending = ending_of(path.name)
    if ending not in (None, *JSON):
        raise ConfigError(
            f"--input {path}: prompts are not read from {ending}; give a text with a prompt on each line, or .jsonl"
        )
    text = decoded(TextFile(path).data())
    if ending is None:
        lines = enumerate(lines_of(text), 1)
        return [Prompt(line, f"--input {path}: line {n}") for n, line in lines if line.strip()]
    try:
        values, unit = entries_of(text, is_lines=ending != ".json")
    except NoRecordsError as error:
        raise ConfigError(f"--input {path}: {error}") from None
    wheres = [f"--input {path}: {unit} {number}" for number, _ in values]
    asked = (_asked_by(value, where) for (_, value), where in zip(values, wheres, strict=True))
    return list(map(Prompt, asked, wheres))


def _asked_by(json_text: str, where: str) -> Asked:
    """Prompt in a value of JSON; `where` is its place in messages."""
    from expertmesh.text.messages import is_unicode, read_messages

    try:
        value = parse_json(json_text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); correct it") from None
    name, asked = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", "")
    if not (name == "messages" and asked) and not (name == "prompt" and isinstance(asked, str)):
        raise ConfigError(
            f'{where}: must be {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}]}}, and '
            "nothing "
            "else; correct it"
        )
    if name == "messages":
        try:
            read_messages(asked)
        except ConfigError as error:
            raise ConfigError(f"{where}: {text_of(error)}") from None
    elif not asked:
        raise ConfigError(f"{where}: prompt='': is empty; give some text to continue")
    elif not is_unicode(asked):
        raise ConfigError(f"{where}: has half a character (a lone surrogate); correct it")
    return asked


def prompts_of(options: Any) -> list[Prompt]:
    """Texts to continue, checked before the model is loaded; empty for --interactive."""
    prompts = _read(options)
    has_talk = options.chat or not all(isinstance(one.asked, str) for one in prompts)
    if options.variables and not has_talk:
        raise ConfigError(
            "--chat-template-kwargs: has no effect on prompts that are no conversation; add --chat, or leave it out"
        )
    return prompts


def _read(options: Any) -> list[Prompt]:
    try:
        if options.input is not None:
            path = expanded(options.input)
            prompts = _asked_in(path)
            if not prompts:
                raise ConfigError(f"--input {path}: has no line; write a prompt on each")
            return prompts
        texts = [read_standard_input()] if options.prompt == ("-",) else [*options.prompt]
        for text in texts:
            text.encode()
    except OSError as error:
        raise ConfigError(
            f"--input {options.input}: cannot be read ({error.strerror}); name a file with a prompt on each line"
        ) from None
    except NotTextError as error:
        raise ConfigError(f"--input {path}: {error}{remedy(error, '')}") from None
    except UnicodeError:
        raise ConfigError("prompt: is not UTF-8 text; convert it, for example with iconv -t UTF-8") from None
    numbers = [f"prompt {number}" if len(texts) > 1 else "" for number in range(1, len(texts) + 1)]
    for text, number in zip(texts, numbers, strict=True):
        if not text:
            place = number and f"{number}: "
            raise ConfigError(f"{place}prompt='': is empty; give some text to continue")
    return [Prompt(text, number) for text, number in zip(texts, numbers, strict=True)]


def read_standard_input() -> str:
    """All of standard input, as UTF-8 whatever the locale, or in the encoding of its byte-order mark."""
    raw = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if raw is None else _text_of(raw.read())


def _text_of(data: bytes) -> str:
    """Bytes of standard input as text."""
    try:
        return decoded(data)
    except NotTextError as error:
        raise ConfigError(f"standard input: {error}{remedy(error, '')}") from None


def asked_by_hand() -> Iterator[str]:
    """Prompts from standard input, one per line, until it ends; a terminal shows a prompt sign."""
    source = getattr(sys.stdin, "buffer", sys.stdin)
    while True:
        if sys.stdin.isatty():
            tell("> ", end="")
        line = source.readline()
        if not line:
            return
        try:
            if isinstance(line, bytes):
                is_marked = encoding_of(line)[0] != "utf-8"  # a file in another encoding is read whole
                text = _text_of(line + sys.stdin.buffer.read() if is_marked else line)
            else:
                text = line
        except ConfigError as error:
            tell(f"error: {error}")
            continue
        for one in lines_of(text):
            if one.strip():
                yield one
