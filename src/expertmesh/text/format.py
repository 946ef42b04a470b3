"""Text format of a model: tokenizer, start tokens, end tokens and chat format.

Everything that generates text uses a `TextFormat`, so that prompts begin and outputs end with the same tokens
everywhere. It is read from the files beside a tokenizer and from the model's configuration.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.text.chat import (
    OWN_TEMPLATE,
    OWN_TEMPLATE_FILE,
    ChatFormat,
    OwnFormat,
    TemplateFormat,
)
from expertmesh.text.limits import TextLimitError, TokenBound
from expertmesh.text.tokenizer import (
    EXTRAS,
    end_of_text_id,
    files_of_tokenizer,
    folder_beside,
    ids_of_text,
    load_tokenizer,
    own_start,
    until_files_change,
)
from expertmesh.text.tokenizer_files import (
    DEFAULT,
    TEMPLATE,
    WITH_TOOLS,
    TokenizerFiles,
    files_in,
    is_read,
    json_object,
)

_MODEL = "config.json"
_BESIDE = (_MODEL, "generation_config.json", "vocab.json", "merges.txt")
_NO_DEFAULT = "{{{{ raise_exception('the model has chat templates named {}, and none is the default') }}}}"


@dataclass(frozen=True)
class TextFormat:
    """Tokenizer, special tokens and chat format for generation."""

    tokenizer: Tokenizer  # the model's tokenizer
    start_ids: tuple[int, ...]  # tokens put before a prompt; empty for a model of the hub whose tokenizer adds none
    end_ids: tuple[int, ...]  # tokens that end a text or an answer
    chat: ChatFormat  # format of conversations
    window: int | None = None  # maximum tokens of the model; None: not known

    @property
    def first_ids(self) -> tuple[int, ...]:
        """Tokens that a text without a prompt begins with: `start_ids`, or if empty the end of text."""
        return self.start_ids or (end_of_text_id(self.tokenizer),)

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template, or the model learned conversations in our own format."""
        return not isinstance(self.chat, OwnFormat) or self.chat.is_known

    @cached_property
    def _bound(self) -> TokenBound:
        return TokenBound(self.tokenizer)

    def ids_of(self, text: str) -> list[int]:
        """Tokens of a text, without `start_ids`."""
        try:
            self._bound.check(text, self.window)
        except TextLimitError as error:
            raise error.of("prompt") from None
        return ids_of_text(self.tokenizer, text)

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of a text to continue, with `start_ids` before them; `first_ids` if the text is empty."""
        ids = self.ids_of(text)
        return [*self.start_ids, *ids] if ids else [*self.first_ids]

    def chat_ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; see `prompt` of `chat`."""
        return self.chat.prompt(messages, window=self.window, **options)


def text_format(tokenizer: Tokenizer, path: Path | None = None, *, model: Any = None) -> TextFormat:
    """The text format of a model.

    Args:
        path: the tokenizer's file, which may have a chat template beside it; None: not known.
        model: configuration of the model. `end_ids`, if it has them, are further tokens that end a text; `start_ids`
            are put before a prompt (None: the tokens that the tokenizer adds there, else its end of text).
            `max_seq_len` is the window.
    """
    chat = find_format(tokenizer, path)
    end = end_of_text_id(tokenizer)
    ends = dict.fromkeys([end, *getattr(model, "end_ids", ()), *chat.ends])
    start = getattr(model, "start_ids", None)
    if start is None:
        start = own_start(tokenizer) or (end,)
    window = getattr(model, "max_seq_len", None)
    return TextFormat(tokenizer, tuple(start), tuple(ends), chat, window)


def hub_start(folder: Path) -> tuple[int, ...]:
    """Start tokens of a hub model: the tokens that its tokenizer.json adds, as in transformers; empty without this
    file."""
    path = folder / "tokenizer.json"
    return _start_of_file(path) if path.is_file() else ()


@until_files_change
def _start_of_file(path: Path) -> tuple[int, ...]:
    return own_start(load_tokenizer(path))


def options_of_files(path: Path, tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Model options that the files beside a run's tokenizer determine.

    Returns:
        "end_ids" if there is a chat template; "start_ids" if the model came from the hub.
    """
    extras = path.parent / EXTRAS
    is_of_hub = "model_type" in json_object(extras / _MODEL, ConfigError)
    found = {}
    if _files(path).templates:
        found["end_ids"] = find_format(tokenizer, path).ends
    if is_of_hub:
        found["start_ids"] = own_start(tokenizer)
    return found


def find_format(tokenizer: Tokenizer, path: Path | None) -> ChatFormat:
    """The chat format of a tokenizer.

    Args:
        path: its file; a chat template may be beside it or in the folder `hub` there. None: it was just learned.
    """
    files = TokenizerFiles() if path is None else _files(path)
    is_own = files.templates.get(DEFAULT) == OWN_TEMPLATE
    own = OwnFormat(tokenizer, is_template=is_own)
    # marks without tokens of their own are text, which the template would not keep apart from what is said
    if not files.templates or (is_own and not own.has_marks):
        return own
    return TemplateFormat(
        tokenizer,
        files.templates.get(DEFAULT) or _NO_DEFAULT.format(", ".join(sorted(files.templates))),
        files.tokens,
        with_tools=files.templates.get(WITH_TOOLS),
        unset=files.unset,
        splits_special=files.splits_special,
    )


def _files(path: Path) -> TokenizerFiles:
    try:
        return files_of_tokenizer(path)
    except CheckpointError as error:
        raise ConfigError(error.line.text) from None


def extras_of(tokenizer_path: str | Path | None) -> dict[str, Path]:
    """Files to copy into a run from the place of its tokenizer, by their names in the run.

    They are the files of a converted model and the files that `find_format` reads, so that it finds the same format
    beside the run's copy.

    Args:
        tokenizer_path: tokenizer.json of a run, or of a folder of the hub; None: there is none.
    """
    if tokenizer_path is None:
        return {}
    path = Path(tokenizer_path)
    _files(path)  # refuses damaged ones
    found, told = files_in(path.parent / EXTRAS), files_in(folder_beside(path))
    if told := {name: one for name, one in told.items() if is_read(name)}:  # all from one folder
        found = {name: one for name, one in found.items() if not is_read(name)} | told
    return {f"{EXTRAS}/{name}": one for name, one in found.items()}


def files_of_format(form: Any, tokenizer_path: Path | None) -> dict[str, Path]:
    """Files to copy into a run that learns conversations, by their names in the run, so that it is known to
    converse."""
    found = extras_of(tokenizer_path)
    if isinstance(form, OwnFormat) and not form.is_known:
        found[f"{EXTRAS}/{TEMPLATE}"] = OWN_TEMPLATE_FILE
    return found


def hub_files(folder: Path) -> dict[str, Path]:
    """Files to copy into a run from the hub folder of its model, by their names in the run; empty for any other
    folder."""
    if "model_type" not in json_object(folder / _MODEL, ConfigError):
        return {}
    return {
        f"{EXTRAS}/{name}": path
        for name, path in files_in(folder).items()
        if is_read(name) or name in _BESIDE or ("token" in path.name and path.parent == folder)
    }
