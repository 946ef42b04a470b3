"""Text format of a model: tokenizer, start tokens, end tokens and chat format.

Everything that generates text uses a `TextFormat`, so that prompts begin and outputs end with the same tokens everywhere. It
is read from the files beside a tokenizer and from the model's configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from expertmesh.config.base import parse_json
from expertmesh.errors import ConfigError
from expertmesh.text.chat import ChatFormat, OwnFormat, TemplateFormat
from expertmesh.text.tokenizer import (
    CONFIG,
    EXTRAS,
    end_of_text_id,
    ids_of_text,
    load_tokenizer,
    named_end,
    own_start,
    token_content,
)

_MODEL = "config.json"
_BESIDE = (_MODEL, "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class TextFormat:
    """Tokenizer, special tokens and chat format for generation.

    Attributes:
        tokenizer: the model's tokenizer.
        start_ids: tokens put before a prompt; empty for a model of the hub whose tokenizer adds none.
        end_ids: tokens that end a text or an answer.
        chat: format of conversations.
    """

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    chat: ChatFormat

    @property
    def first_ids(self) -> tuple[int, ...]:
        """Tokens that a text without a prompt begins with: `start_ids`, or if empty the end of text."""
        return self.start_ids or (end_of_text_id(self.tokenizer),)

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template, or the tokenizer was learned from conversations."""
        return not isinstance(self.chat, OwnFormat) or self.chat.has_marks

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of a text to continue, with `start_ids` before them; `first_ids` if the text is empty."""
        ids = ids_of_text(self.tokenizer, text)
        return [*self.start_ids, *ids] if ids else [*self.first_ids]


def text_format(tokenizer: Tokenizer, path: Path | None = None, *, model: Any = None) -> TextFormat:
    """The text format of a model.

    Args:
        tokenizer: the model's tokenizer.
        path: the tokenizer's file, which may have a chat template beside it; None: not known.
        model: configuration of the model. `end_ids`, if it has them, are further tokens that end a text; `start_ids` are put
            before a prompt (None: the tokens that the tokenizer adds there, else its end of text).

    Raises:
        CheckpointError: the tokenizer has no token for the end of a text.
        ConfigError: files beside the tokenizer are damaged.
    """
    chat = find_format(tokenizer, path)
    end = end_of_text_id(tokenizer)
    ends = dict.fromkeys([end, *getattr(model, "end_ids", ()), *chat.ends])
    start = getattr(model, "start_ids", None)
    if start is None:
        start = own_start(tokenizer) or (end,)
    return TextFormat(tokenizer, tuple(start), tuple(ends), chat)


def hub_start(folder: Path) -> tuple[int, ...]:
    """Start tokens of a hub model: the tokens that its tokenizer.json adds, as in transformers; empty without this file.

    Args:
        folder: folder of the hub model.
    """
    path = folder / "tokenizer.json"
    return own_start(load_tokenizer(path)) if path.is_file() else ()


def told_by_files(path: Path, tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Model options that the files beside a run's tokenizer determine.

    Args:
        path: the tokenizer's file.
        tokenizer: the tokenizer read from it.

    Returns:
        "end_ids" if there is a chat template; "start_ids" if the model came from the hub.

    Raises:
        ConfigError: the files are damaged.
        CheckpointError: the tokenizer has no token for the end of a text.
    """
    extras = path.parent / EXTRAS
    is_of_hub = "model_type" in _json(extras / _MODEL)
    has_template = _find_template(path) is not None
    found = {}
    if has_template:
        found["end_ids"] = find_format(tokenizer, path).ends
    if is_of_hub:
        found["start_ids"] = own_start(tokenizer)
    return found


def find_format(tokenizer: Tokenizer, path: Path | None) -> ChatFormat:
    """The chat format of a tokenizer.

    Args:
        tokenizer: the tokenizer.
        path: its file; a chat template may be beside it or in the folder `hub` there. None: it was just learned.

    Raises:
        ConfigError: the files beside it are damaged.
    """
    found = None if path is None else _find_template(path)
    return OwnFormat(tokenizer) if found is None else TemplateFormat(tokenizer, *found[1:])


def extras_of(tokenizer_path: str | Path | None) -> dict[str, Path]:
    """Files to copy into a run from the place of its tokenizer, by their names in the run.

    They are the files of a converted model and the files that `find_format` reads, so that it finds the same format beside
    the run's copy.

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
        for name in (CONFIG, _TEMPLATE):  # both from the same folder
            found.pop(name, None)
            found[name] = template.folder / name
    elif CONFIG not in found and named_end(load_tokenizer(Path(tokenizer_path))) is not None:
        found[CONFIG] = Path(tokenizer_path).parent / CONFIG
    return {f"{EXTRAS}/{name}": path for name, path in found.items() if path.is_file()}


def hub_files(folder: Path) -> dict[str, Path]:
    """Files to copy into a run from the hub folder of its model, by their names in the run; empty for any other folder.

    Raises:
        ConfigError: the folder's config.json is damaged.
    """
    if "model_type" not in _json(folder / _MODEL):
        return {}
    return {
        f"{EXTRAS}/{path.name}": path
        for path in sorted(folder.iterdir())
        if path.is_file() and ("token" in path.name or path.name in _BESIDE)
    }


class _Template(NamedTuple):
    folder: Path
    source: str
    variables: dict[str, str]


def _find_template(path: Path) -> _Template | None:
    """The chat template beside a tokenizer's file; None: there is none."""
    for folder in (path.parent / EXTRAS, path.parent):
        values = _json(folder / CONFIG)
        source = values.get("chat_template")
        if (folder / _TEMPLATE).is_file():
            try:
                source = (folder / _TEMPLATE).read_text(encoding="utf-8-sig")
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


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in values.items():
        text = token_content(value)
        if name.endswith("_token") and text is not None:
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
