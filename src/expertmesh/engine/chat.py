"""Prompts of conversations for an engine, from messages as chat interfaces have them."""

from collections.abc import Mapping
from typing import Any

from expertmesh.errors import ConfigError
from expertmesh.text.chat import RESERVED_VARIABLES
from expertmesh.text.format import TextFormat
from expertmesh.text.limits import TextLimitError
from expertmesh.text.messages import is_unicode, read_messages
from expertmesh.text.tools import read_tools

_UNWRITTEN = "the model's chat template does not write them"


def conversation_ids(
    text: TextFormat | None,  # text format of the model; None: there is no tokenizer
    messages: Any,  # see `read_messages`
    *,
    tools: Any = None,  # see `read_tools`; None: there are none
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,  # whether the last message stays open
    chat_template_kwargs: Mapping[str, Any] | None = None,  # further variables of the chat template
) -> list[int]:
    """Token ids of a conversation; see `Engine.chat_ids`.

    Args:
        add_generation_prompt: whether the beginning of an answer follows; None: unless the last message is continued.
    """
    if text is None or not text.can_chat:
        missing = "has no tokenizer" if text is None else "has no chat template, and no tokens for roles"
        raise ConfigError(
            f"messages: the model {missing}; make the engine of a folder with a chat template, or ask with texts or "
            "token ids (generate)"
        )
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping):
        raise ConfigError(
            "chat_template_kwargs: must be variables of the template by name; give a dict such as {'enable_thinking': "
            "False}"
        )
    for name, value in (("chat_template_kwargs", variables), ("tools", tools)):
        if not is_unicode([value]):
            raise ConfigError(f"{name}: has half a character; correct it")
    if wrong := [name for name in RESERVED_VARIABLES if name in variables]:
        raise ConfigError(f"chat_template_kwargs: may not have {wrong[0]!r}; leave it out")
    if continue_final_message and add_generation_prompt:
        raise ConfigError("continue_final_message: excludes add_generation_prompt; leave one out")
    known = read_tools(tools) if tools is not None else None
    if known and not text.chat.writes("tools"):
        raise ConfigError(f"tools: {_UNWRITTEN}; leave them out, or use a model whose template does")
    try:
        said = read_messages(messages)
        if any(one.get("tool_calls") for one in said) and not text.chat.writes("tool_calls"):
            raise ConfigError(f"have calls of tools, and {_UNWRITTEN}; leave them out")
        ids = text.chat_ids(
            said,
            tools=known or None,
            asks=add_generation_prompt is not False,
            continues=continue_final_message,
            variables=variables,
        )
    except TextLimitError as error:
        raise error.of("messages") from None
    except ConfigError as error:
        raise ConfigError(f"messages: {error}") from None
    if not ids:
        raise ConfigError("messages: the chat template writes nothing; say something")
    return ids


def prompts_of_conversations(text: TextFormat | None, given: Any, **options: Any) -> list[list[int]]:
    """Prompts of one conversation or several; errors of one among several name it."""
    if not isinstance(given, list | tuple) or not given or isinstance(given[0], Mapping):
        return [conversation_ids(text, given, **options)]
    prompts = []
    for number, messages in enumerate(given, 1):
        try:
            prompts.append(conversation_ids(text, messages, **options))
        except ConfigError as error:
            if len(given) == 1:
                raise
            raise ConfigError(f"conversation {number}: {error}") from None
    return prompts
