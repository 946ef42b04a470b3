"""Tokenizers: byte-level BPE (Radford et al. 2019, 2.2; Sennrich et al. 2016) trained here, and tokenizer files from
elsewhere.

Training uses the training split only.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from expertmesh.config.base import parse_json
from expertmesh.config.tokens import TokensConfig
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh.text.limits import BYTE_TOKENS, IN_NO_TEXT
from expertmesh.text.tokenizer_files import CONFIG, TokenizerFiles, files_read, read_tokenizer_files

_Ts = TypeVarTuple("_Ts")
_T = TypeVar("_T")

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""Id of the end of text in every tokenizer trained here."""
_OTHER_ENDS = ("</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
EXTRAS = "hub"
"""Folder of a run directory for the files that came with its tokenizer."""
_LONG = 4096
"""Characters from which encoding takes milliseconds, in which a server's other threads should run."""
TRAINING_BYTES = 16_000_000
"""Bytes of the training split that merges are learned from, about; more changes little."""


def train_tokenizer(training_texts: Iterable[str], *, vocab_size: int, marks: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        training_texts: documents of the training split; about the first `TRAINING_BYTES` characters are used.
        vocab_size: maximum number of tokens, at least 257 (the 256 bytes and the end of text) plus the marks.
        marks: further special tokens, which no text is encoded to; their ids are 1, 2, ...

    Returns:
        A tokenizer that encodes any text without loss and treats `END_OF_TEXT` and the marks in a text as text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(training_texts, TRAINING_BYTES), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """Read a tokenizer of a run or of the hub.

    It is what transformers makes of the files beside it, too: they name special tokens, add tokens and change the flags
    of added ones.

    Args:
        path: the tokenizer.json; if it has no known end-of-text token, the `eos_token` of the files beside it is used.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode("\U0010fffd")  # in no vocabulary: fails if the unknown token is missing
    except Exception as error:  # The library raises plain Exception.
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path}: is not a readable tokenizer ({reason}); restore the file or train again"
        ) from None
    if vocab_size is not None and tokenizer.get_vocab_size() > vocab_size:
        raise CheckpointError(
            f"{path}: has {tokenizer.get_vocab_size()} tokens and the model {vocab_size}; it is of another run: "
            "restore the "
            "file from"
            " a copy"
        )
    files = files_of_tokenizer(path)
    tokenizer = _with_files(tokenizer, files, vocab_size)
    if _known_end(tokenizer) is None:
        vars(tokenizer)["eos_token"] = files.tokens.get("eos_token")
    # The file does not keep this flag; without it an end-of-text token quoted in a text would become that token.
    tokenizer.encode_special_tokens = True
    # The file keeps truncation and padding of earlier uses, which would silently cut or pad every text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Write tokenizer.json, and a tokenizer_config.json if the end of text is named there; return the tokenizer read
    back."""
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if (token := named_end(tokenizer)) is not None:
        (folder / CONFIG).write_text(json.dumps({"eos_token": token}), encoding="utf-8")
    return load_tokenizer(path)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a text: a well-known one, else the one named by a file beside the tokenizer."""
    found = _known_end(tokenizer)
    if found is None and (token := named_end(tokenizer)) is not None:
        found = tokenizer.token_to_id(token)
    if found is None:
        raise CheckpointError(
            f"tokenizer.json: has no token for the end of a text ({', '.join((END_OF_TEXT, *_OTHER_ENDS))}, or the "
            "eos_token of"
            f" {CONFIG}); add one"
        )
    return found


def until_files_change(function: Callable[[Path, *_Ts], _T]) -> Callable[[Path, *_Ts], _T]:
    """A function of a tokenizer.json and hashable values, which keeps its results while the file and those beside it
    have the same bytes."""
    kept = lru_cache(maxsize=8)(lambda _, path, *given: function(path, *given))

    @wraps(function)
    def call(path: Path, *given: *_Ts) -> _T:
        path = path.absolute()
        files = (path, *(file for folder in _places(path) for file in files_read(folder)))
        digests = tuple((file, hashlib.sha256(file.read_bytes()).digest()) for file in files if file.is_file())
        return kept(digests, path, *given)

    return call


def _known_end(tokenizer: Tokenizer) -> int | None:
    ids = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, *_OTHER_ENDS))
    return next((int(i) for i in ids if i is not None), None)


def named_end(tokenizer: Tokenizer) -> str | None:
    """End-of-text token that a file beside the tokenizer named; None: the tokenizer has a well-known one, or none."""
    found: str | None = vars(tokenizer).get("eos_token")
    return found


def folder_beside(path: Path) -> Path:
    """Folder whose files say what a tokenizer.json leaves open: the folder `hub` of a run or its own; the one with a
    template."""
    found = [(read_tokenizer_files(folder), folder) for folder in _places(path)]
    told = [folder for files, folder in found if files != TokenizerFiles()]
    return next((folder for files, folder in found if files.templates), (*told, path.parent)[0])


def _places(path: Path) -> tuple[Path, Path]:
    return path.parent / EXTRAS, path.parent


def files_of_tokenizer(path: Path) -> TokenizerFiles:
    """Facts that the files beside a tokenizer.json tell of it; raises CheckpointError if one of them is damaged."""
    return read_tokenizer_files(folder_beside(path))


def _with_files(tokenizer: Tokenizer, files: TokenizerFiles, vocab_size: int | None) -> Tokenizer:
    """The tokenizer as transformers makes it of all files: with their tokens, flags of tokens and special tokens.

    Tokens for which the model has no room (padding of a former training) are left out.
    """
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named = [token for token in known.values() if token.content in files.special and not token.special]
    for token in named:
        token.special = True
    told = [*named, *files.changed, *(token for token in files.added if token.content not in known)]
    vocab = tokenizer.get_vocab()
    new = [*dict.fromkeys(token.content for token in told if token.content not in vocab)]
    left_out = set() if vocab_size is None else {*new[max(vocab_size - len(vocab), 0) :]}
    tokenizer.add_tokens([token for token in told if token.content not in left_out])
    return tokenizer


def ids_of_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text, without those that the tokenizer puts around it. Other threads run while a long text is
    encoded."""
    if len(text) < _LONG:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    else:  # `encode` holds Python's lock
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def own_start(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Special tokens that the tokenizer itself puts before a text (`<s>`)."""
    found = tokenizer.encode("a")
    return tuple(found.ids[: found.special_tokens_mask.index(0)])


def with_start(path: Path, start_ids: Sequence[int]) -> str | None:
    """Contents of a tokenizer.json whose tokenizer itself puts these tokens before a text, and nothing behind it.

    Args:
        start_ids: tokens to put before every text, and of a pair before each.

    Returns:
        None if the file's tokenizer puts these tokens there already.
    """
    tokenizer = load_tokenizer(path)
    if own_start(tokenizer) == tuple(start_ids):
        return None
    values = parse_json(path.read_bytes())
    given = values.get("post_processor") or {}
    several = [one for one in given.get("processors", [given]) if one.get("type") == "ByteLevel"]
    names = {i: tokenizer.id_to_token(i) or f"<{i}>" for i in start_ids}
    pieces = [
        [
            *({"SpecialToken": {"id": names[i], "type_id": at}} for i in start_ids),
            {"Sequence": {"id": text, "type_id": at}},
        ]
        for at, text in enumerate("AB")
    ]
    template = {
        "type": "TemplateProcessing",
        "single": pieces[0],
        "pair": [*pieces[0], *pieces[1]],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()},
    }
    several.append(template)
    values["post_processor"] = template if len(several) == 1 else {"type": "Sequence", "processors": several}
    return json.dumps(values, indent=2, ensure_ascii=False)


def gives_same_tokens(path: Path, other: Path) -> bool:
    """Whether two files are equal, or are tokenizers that differ only in what they put around a text."""
    found = [path.read_bytes(), other.read_bytes()]
    if found[0] == found[1]:
        return True
    try:
        ours, theirs = map(parse_json, found)
    except ValueError:
        return False
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return False
    around = "post_processor"
    return {**ours, around: None} == {**theirs, around: None}


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether each character of its vocabulary stands for a byte."""
    decoder = tokenizer.decoder
    kind = {} if decoder is None else json.loads(decoder.__getstate__())
    return any(one.get("type") == "ByteLevel" for one in (kind, *kind.get("decoders", [])))


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens, by name."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if token.special}


BLANK = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a blank."""


def _falls_back(model: models.Model) -> bool:
    """Whether a model writes what it does not know as bytes."""
    return isinstance(model, models.BPE) and model.byte_fallback


def tokens_to_add(
    tokenizer: Tokenizer, texts: Iterable[str], *, special: bool, option: str = "tokens.add"
) -> list[AddedToken]:
    """Added tokens of the texts that the tokenizer has not as such; a piece of its vocabulary keeps its id."""
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    new = []
    for text in texts:
        if special and not added.get(text, True):
            rule = "is an added token of the tokenizer that is not special"
            raise ConfigError(option, text, rule, "leave special out, or train with a tokenizer where it is")
        if text in added:
            continue
        if (at := tokenizer.token_to_id(text)) is not None:
            found = tokenizer.decode([at], skip_special_tokens=False)
            if found != text:  # "é" is a byte in a byte-level vocabulary, and "Ġa" a blank and an a
                raise ConfigError(option, text, f"is a piece of the vocabulary for {found!r}", "choose another text")
        new.append(AddedToken(text, special=special, normalized=False))
    return new


def given_tokenizer(path: Path, *, vocab_size: int, tokens: TokensConfig | None = None) -> Tokenizer:
    """Read a tokenizer that was made elsewhere, for option data.encode_with, and add tokens to it."""
    try:
        tokenizer = load_tokenizer(path)
        if tokens is not None:
            tokenizer.add_tokens(tokens_to_add(tokenizer, tokens.add, special=tokens.special))
    except CheckpointError as error:
        raise ConfigError(named("data.encode_with", error)) from None
    is_ours, model = is_byte_level(tokenizer), tokenizer.model
    if not is_ours and not isinstance(model, models.Unigram) and not _falls_back(model):
        raise ConfigError(
            "data.encode_with",
            path,
            "is neither byte-level nor of SentencePiece (BPE with byte fallback, Unigram), so that text would get lost",
            "use a model that has one",
        )
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) if is_ours else {*BYTE_TOKENS}
    lost = alphabet - IN_NO_TEXT - set(tokenizer.get_vocab())
    # a Unigram without bytes has a token for what it does not know, as it was trained
    if lost and (is_ours or _falls_back(model)):
        raise ConfigError(
            "data.encode_with",
            path,
            f"has no token for {len(lost)} of the bytes, whose text would get lost",
            "train it with initial_alphabet=ByteLevel.alphabet()",
        )
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            "data.encode_with",
            path,
            f"has {tokenizer.get_vocab_size()} tokens, {named('model.vocab_size')} is {vocab_size}",
            "raise it",
        )
    try:
        end_of_text_id(tokenizer)
    except CheckpointError:
        raise ConfigError(
            "data.encode_with",
            path,
            f"has no token {END_OF_TEXT} for the end of a document",
            f"add one, or name it as eos_token in the {CONFIG} beside it",
        ) from None
    return tokenizer


def token_num_bytes(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Number of bytes of text that every token stands for.

    Args:
        tokenizer: a byte-level BPE, or one of SentencePiece, of which bytes of the normalised text are counted, with
            the blank that it puts before a text.
        vocab_size: V of the model, at least the tokenizer's.

    Returns:
        (V,) int64; 0 for the end of text, for marks (special tokens) and for ids without a token.
    """
    sizes = np.zeros(vocab_size, dtype=np.int64)
    added, is_ours = tokenizer.get_added_tokens_decoder(), is_byte_level(tokenizer)
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in added and not is_ours and tokenizer.decoder is not None:
            sizes[token_id] = 1 if token in BYTE_TOKENS else len(token.replace(BLANK, " ").encode())
        elif token_id not in added:
            sizes[token_id] = len(token)  # a byte-level vocabulary writes each byte as one character
        elif not added[token_id].special:  # added as plain text, for example several blanks
            sizes[token_id] = len(token.encode())
    return sizes


def _first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        if seen >= num_bytes:
            return
        seen += len(text)
        yield text
