"""What text is to a model: its tokens, what is put before a text, what ends one, and how a conversation is written.

Whoever generates text takes a `TextFormat`, so that all put the same before a prompt and stop at the same. It is found in the
files beside a tokenizer and in the model's own configuration.
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
    load_tokenizer,
    named_end,
    own_start,
)

_MODEL = "config.json"
_BESIDE = (_MODEL, "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class TextFormat:
    """What generation needs to know of text.

    Attributes:
        tokenizer: of the model.
        start_ids: tokens put before a prompt; none of a model of the hub whose tokenizer puts none there.
        end_ids: tokens that end a text, or an answer.
        chat: how a conversation is written.
    """

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    chat: ChatFormat

    @property
    def first_ids(self) -> tuple[int, ...]:
        """What a text without a prompt begins with: `start_ids`, else the end of the text before it."""
        return self.start_ids or (end_of_text_id(self.tokenizer),)

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of a text to continue; of an empty one its beginning."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self.start_ids, *ids] if ids else [*self.first_ids]


def text_format(tokenizer: Tokenizer, path: Path | None = None, *, model: Any = None) -> TextFormat:
    """What text is to a model.

    Args:
        tokenizer: of the model.
        path: the tokenizer's file, beside which a chat template may lie; None: not known.
        model: says more where it has `end_ids` (tokens that end a text) and `start_ids` (put before a prompt; None: those that the
            tokenizer puts there, else its end of text).

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
    """What is put before a prompt of a hub model: what its tokenizer.json puts there, as transformers does; nothing without one.

    Args:
        folder: of the hub.
    """
    path = folder / "tokenizer.json"
    return own_start(load_tokenizer(path)) if path.is_file() else ()


def told_by_files(path: Path, tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """What the files beside a run's tokenizer say of its texts, as options of its model.

    Args:
        path: the tokenizer's file.
        tokenizer: read from it.

    Returns:
        "end_ids", those of the chat template; "start_ids" of a model that came from the hub.

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
        for name in (CONFIG, _TEMPLATE):  # these two belong together
            found.pop(name, None)
            found[name] = template.folder / name
    elif CONFIG not in found and named_end(load_tokenizer(Path(tokenizer_path))) is not None:
        found[CONFIG] = Path(tokenizer_path).parent / CONFIG
    return {f"{EXTRAS}/{name}": path for name, path in found.items() if path.is_file()}


def hub_files(folder: Path) -> dict[str, Path]:
    """Files that a run with the model of a hub folder keeps of it, by their names there; none where the folder is another.

    Raises:
        ConfigError: its config.json is damaged.
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
    """The chat template of a tokenizer's file."""
    for folder in (path.parent / EXTRAS, path.parent):
        values = _json(folder / CONFIG)
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
