"""Files beside a tokenizer.json, read as transformers reads them: tokens that are added, tokens by name, chat
templates.

| File | What is read |
|---|---|
| tokenizer_config.json | named tokens, added_tokens_decoder, extra_special_tokens, chat_template, split_special_tokens
| | special_tokens_map.json, added_tokens.json | the same of older folders; only where there is no added_tokens_decoder
| | chat_template.jinja, additional_chat_templates/*.jinja | templates; they replace the ones of tokenizer_config.json |

A tokenizer.json tells itself how text becomes tokens. `add_bos_token` and `add_eos_token` change nothing beside it, and
chat_template.json belongs to processors of images.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from expertmesh.config.base import parse_json
from expertmesh.errors import CheckpointError

CONFIG = "tokenizer_config.json"
_TOKEN_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json")
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the templates for conversations without and with tools."""
_OPEN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that name no token by default."""
_NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
"""Tokens that every tokenizer may name, in the order in which they are added; others follow."""
_EXTRA, _FORMER = "extra_special_tokens", "additional_special_tokens"
"""Name of the further special tokens, and their former one."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """Facts that the files of a folder tell of its tokenizer."""

    # named special tokens, by the variables of templates that have them
    tokens: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] | None = ()  # names that are said to be no token; None: all that are not named are none
    changed: tuple[AddedToken, ...] = ()  # tokens as they are, whatever the tokenizer.json says of them
    added: tuple[AddedToken, ...] = ()  # tokens to add, in this order, unless the tokenizer.json has them
    special: frozenset[str] = frozenset()  # tokens that are special ones
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates by name
    splits_special: bool = False  # whether special tokens in a text are encoded as text


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Facts that the files of a folder tell of its tokenizer."""
    config, older, map_ = json_object(folder / CONFIG), {}, {}
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        listed, older = {}, json_object(folder / "added_tokens.json")
        map_ = json_object(folder / "special_tokens_map.json")
    values, several = _named(config, map_)
    tokens = {name: text for name, value in values.items() if (text := token_content(value))}
    names = {text for one in (*values.values(), *several) if (text := token_content(one))}
    changed = [_token(listed[i], tokens.values()) for i in sorted(listed, key=_number)]
    by_id = sorted((i, text) for text, i in older.items() if isinstance(i, int))
    added = [_token(text, names) for _, text in by_id]
    has = {token.content for token in (*changed, *added) if token}
    more = [_token(one, names) for one in (*values.values(), *several)]
    added += [token for token in more if token and token.content not in has]
    is_open = config.get("tokenizer_class") in _OPEN_CLASSES
    return TokenizerFiles(
        tokens=tokens,
        unset=None if is_open else tuple(name for name in values if name not in tokens),
        changed=tuple(token for token in changed if token),
        added=tuple(token for token in added if token),
        special=frozenset(names.union(t.content for t in changed if t and t.special)),
        templates=_templates(folder, config.get("chat_template")),
        splits_special=config.get("split_special_tokens") is True,
    )


def is_read(name: str) -> bool:
    """Whether `read_tokenizer_files` reads a file of this name, relative to its folder."""
    return name in (*_TOKEN_FILES, TEMPLATE) or name.startswith(f"{TEMPLATES}/")


def files_read(folder: Path) -> list[Path]:
    """Files that `read_tokenizer_files` reads where they are there."""
    return [*(folder / name for name in (*_TOKEN_FILES, TEMPLATE)), *sorted((folder / TEMPLATES).glob("*.jinja"))]


def files_in(folder: Path) -> dict[str, Path]:
    """Files of a folder, and its further templates, by their names relative to it."""
    several = [*sorted(folder.glob("*")), *sorted((folder / TEMPLATES).glob("*.jinja"))]
    return {path.relative_to(folder).as_posix(): path for path in several if path.is_file()}


def token_content(token: Any) -> str | None:
    """Text of a token in these files."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _number(key: str) -> int:
    return int(key) if key.isdecimal() else -1


def _named(config: Mapping[str, Any], older: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tokens by name, and those without one, in the order in which they are added.

    Args:
        older: values of special_tokens_map.json, which replace them, except texts under names of the model's own.
    """
    given = dict(config)
    if not given.get(_EXTRA) and _FORMER in given:
        given[_EXTRA] = given.pop(_FORMER)
    own = {
        name: value
        for name, value in given.items()
        if name.endswith("_token") and name not in _NAMED and isinstance(value, str)
    }
    extra, more = given.get(_EXTRA), older.get(_EXTRA)
    for one in (extra, more):
        own |= one if isinstance(one, dict) else {}
    if not isinstance(extra, list) and more is None:
        more = older.get(_FORMER)
    both = {**given, **older}
    names = [name for name in (*_NAMED, *both) if name.endswith("_token") and name in both]
    several = [one for listed in (extra, more) if isinstance(listed, list) for one in listed]
    return {name: both[name] for name in names if name not in own} | own, several


def _token(given: Any, special: Collection[str]) -> AddedToken | None:
    """A token as a file has it, special if it is among these; None: it is no token."""
    if not (text := token_content(given)):
        return None
    flags = {name: given[name] for name in _FLAGS if name in given} if isinstance(given, dict) else {}
    flags |= {"special": True} if text in special else {}
    return AddedToken(text, **{name: bool(value) for name, value in flags.items()})


def _templates(folder: Path, given: Any) -> dict[str, str]:
    """Chat templates by name."""
    paths = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    paths |= {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if paths:
        return {name: _text(path) for name, path in paths.items()}
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    named = given if isinstance(given, dict) else {DEFAULT: given}
    return {str(name): source for name, source in named.items() if isinstance(source, str)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeError:
        raise CheckpointError(f"{path}: is no UTF-8 text; restore it from the hub") from None


def json_object(path: Path, error: type[Exception] = CheckpointError) -> dict[str, Any]:
    """Values of a JSON file of the hub; none if there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = parse_json(path.read_bytes())
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise error(f"{path}: is no JSON object; restore it from the hub")
    return values
