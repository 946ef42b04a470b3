"""Byte-level BPE (Radford et al. 2019, 2.2; Sennrich et al. 2016), trained on the training split only."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from expertmesh.config.base import parse_json
from expertmesh.errors import CheckpointError, ConfigError, named

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""Its id in every tokenizer trained here."""
_OTHER_ENDS = ("</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
EXTRAS, CONFIG = "hub", "tokenizer_config.json"
"""Folder of a run directory with what lay beside its tokenizer elsewhere, and the file that names special tokens."""
_IN_NO_TEXT = set("\xc0\xc1\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff")
"""Characters of the bytes that UTF-8 never has."""
TRAINING_BYTES = 16_000_000
"""The merges are learned from about so many bytes of the training split; more changes little."""


def train_tokenizer(
    training_texts: Iterable[str], *, vocab_size: int, marks: Sequence[str] = ()
) -> Tokenizer:
    """Learn the merges.

    Args:
        training_texts: documents of the training split; about the first `TRAINING_BYTES` characters are used.
        vocab_size: tokens at most, at least 257 and the marks: the 256 bytes and the end of text.
        marks: more tokens that no text becomes; their ids are 1, 2, ...

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
    """Read a tokenizer that a run saved, or the hub has.

    Args:
        path: the file; where it has no known token for the end of a text, the `eos_token` of the tokenizer_config.json beside it is
            that.
        vocab_size: V of the run's model; None: not known.

    Raises:
        CheckpointError: the file is missing or damaged, fails at a text that it does not know, or of a model with a larger vocabulary.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode(
            "\U0010fffd"
        )  # in no vocabulary: fails where the token for the unknown is missing
    except Exception as error:  # The library raises plain Exception.
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path}: is not a readable tokenizer ({reason}); restore the file or train again"
        ) from None
    if vocab_size is not None and tokenizer.get_vocab_size() > vocab_size:
        raise CheckpointError(
            f"{path}: has {tokenizer.get_vocab_size()} tokens and the model {vocab_size}; it is of another run: restore the "
            "file from"
            " a copy"
        )
    if _known_end(tokenizer) is None:
        vars(tokenizer)["eos_token"] = eos_token_beside(path)
    # Not in the file: without it a text that quotes the end-of-text token would become that token.
    tokenizer.encode_special_tokens = True
    # In the file where it was saved after a use with them: every text would silently be cut, or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Write tokenizer.json, and beside it what says how a text ends where that is not known; returns what is read back."""
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if (token := named_end(tokenizer)) is not None:
        (folder / CONFIG).write_text(json.dumps({"eos_token": token}), encoding="utf-8")
    return load_tokenizer(path)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The token that ends a text: of a tokenizer trained here, or of one that came with a converted model, its own.

    Raises:
        CheckpointError: it has none that is known, and no file beside it named one when it was loaded.
    """
    found = _known_end(tokenizer)
    if found is None and (token := named_end(tokenizer)) is not None:
        found = tokenizer.token_to_id(token)
    if found is None:
        raise CheckpointError(
            f"tokenizer.json: has no token for the end of a text ({', '.join((END_OF_TEXT, *_OTHER_ENDS))}, or the eos_token of"
            f" {CONFIG}); add one"
        )
    return found


def _known_end(tokenizer: Tokenizer) -> int | None:
    ids = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, *_OTHER_ENDS))
    return next((int(i) for i in ids if i is not None), None)


def named_end(tokenizer: Tokenizer) -> str | None:
    """The token that ends a text because a file beside the tokenizer says so; None: it has a known one, or none."""
    found: str | None = vars(tokenizer).get("eos_token")
    return found


def eos_token_beside(path: Path) -> str | None:
    """The eos_token that the files beside a tokenizer.json name.

    Raises:
        CheckpointError: such a file is damaged.
    """
    for place in (path.parent / EXTRAS / CONFIG, path.parent / CONFIG):
        if not place.is_file():
            continue
        try:
            found = parse_json(place.read_bytes()).get("eos_token")
        except (ValueError, AttributeError):
            raise CheckpointError(f"{place}: is no JSON object; restore it from the hub") from None
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str):
            return found
    return None


def own_start(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that the tokenizer itself puts before a text (`<s>`)."""
    found = tokenizer.encode("a")
    return tuple(found.ids[: found.special_tokens_mask.index(0)])


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether each character of its vocabulary stands for a byte."""
    decoder = tokenizer.decoder
    kind = {} if decoder is None else json.loads(decoder.__getstate__())
    return any(one.get("type") == "ByteLevel" for one in (kind, *kind.get("decoders", [])))


def given_tokenizer(path: Path, *, vocab_size: int) -> Tokenizer:
    """Read a tokenizer that was made elsewhere.

    Args:
        path: a tokenizer.json.
        vocab_size: V of the model.

    Raises:
        ConfigError: it is missing, no byte-level one, without a byte that texts have, larger than the vocabulary, or has no end of text.
    """
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError as error:
        raise ConfigError(named("data.encode_with", error)) from None
    if not is_byte_level(tokenizer):
        raise ConfigError(
            "data.encode_with",
            path,
            "is no byte-level one, so that bits per byte mean nothing",
            "use a model that has one",
        )
    lost = set(pre_tokenizers.ByteLevel.alphabet()) - _IN_NO_TEXT - set(tokenizer.get_vocab())
    if lost:
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
    """Bytes of text that every token stands for.

    Args:
        tokenizer: byte-level BPE.
        vocab_size: V of the model, at least the tokenizer's.

    Returns:
        (V,) int64; 0 for the end of text, for marks (special tokens) and for ids without a token.
    """
    sizes = np.zeros(vocab_size, dtype=np.int64)
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in added:
            sizes[token_id] = len(
                token
            )  # A byte-level vocabulary writes each byte as one character.
        elif not added[token_id].special:  # plain text, several blanks for example
            sizes[token_id] = len(token.encode())
    return sizes


def _first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        if seen >= num_bytes:
            return
        seen += len(text)
        yield text
