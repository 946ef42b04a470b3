"""Translation of texts by an encoder-decoder: tokenize, batch by length, beam search, decode."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from expertmesh.config.values import WHOLE, Number, type_of
from expertmesh.data.data_progress import Progress
from expertmesh.errors import ConfigError, named
from expertmesh.models.decoder import CausalLM, EncoderDecoder, Translation
from expertmesh_families.seq2seq.beam import beam_search

_NAMED = 20
"""Limit of texts that a message names by number."""
_NEAR = 32
"""Batches per window of texts that are sorted by length."""
_SENTENCE = re.compile(r"[.!?…]+[\"')\]»”’]*\s+|[。！？]+[」』）”’]*\s*")
"""End of a sentence, with the blanks behind it."""
_BLANKS = re.compile(r"\s+")
_log = logging.getLogger("expertmesh.data")


def translate(
    model: CausalLM,  # an encoder-decoder
    tokenizer: Tokenizer,  # the model's tokenizer
    translation: Translation,
    texts: Sequence[str],  # one line each
    *,
    num_beams: int = 5,  # see `beam_search`
    length_penalty: float = 1.0,  # see `beam_search`
    batch_size: int = 32,  # texts that are translated together
    max_tokens: int | None = None,
    split_long: bool = False,
    each: Callable[[str], None] | None = None,
) -> list[str]:
    """Translations of the texts, in their order; a blank text stays blank.

    Logs a warning that names the translations cut off at their maximum length.

    Args:
        translation: special tokens for the target language, from `expertmesh.models.builder.ModelBuilder.translation`.
        max_tokens: see `beam_search`; None: twice the source's tokens plus 16, limited by the model's context.
        split_long: whether texts longer than the model's context are translated in pieces, cut at ends of sentences.
        each: called with each translation, in order, as soon as it and all earlier ones are done.
    """
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(f"{type_of(model)} reads no sources; use an encoder-decoder")
    Number(1, fix="32 is usual", types=WHOLE).check("batch_size", batch_size)
    parts = [[text] for text in texts]
    if split_long:
        around = len(translation.before) + len(translation.after)

        def fits(text: str) -> bool:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            return around + len(ids) <= model.max_source_len

        parts = [split_text(text.strip(), fits) for text in texts]
    whose = [number for number, cut in enumerate(parts, 1) for _ in cut]
    flat = [piece for cut in parts for piece in cut]
    encoded = tokenizer.encode_batch_fast(flat, add_special_tokens=False)
    sources = [[*translation.before, *encoding.ids, *translation.after] for encoding in encoded]
    # batches of similar lengths, sorted within windows so that the first translations are done early
    order = sorted(
        (i for i, text in enumerate(flat) if text.strip()),
        key=lambda i: (i // (_NEAR * batch_size), len(sources[i])),
    )
    _check_lengths({whose[i]: len(sources[i]) for i in order}, model.max_source_len)
    room = model.max_seq_len - len(translation.start)
    found = [""] * len(flat)
    endless: set[int] = set()
    told = Progress("translated", total=len(order), unit="texts")
    done = _InOrder(parts, found, set(order), each)
    done.settle()
    for first in range(0, len(order), batch_size):
        told.at(first)
        batch = order[first : first + batch_size]
        usual = [min(room, 2 * len(sources[i]) + 16) for i in batch]
        outputs = beam_search(
            model,
            [sources[i] for i in batch],
            start=translation.start,
            end_id=translation.end_id,
            num_beams=num_beams,
            length_penalty=length_penalty,
            max_tokens=usual if max_tokens is None else max_tokens,
        )
        for i, output in zip(batch, outputs, strict=True):
            found[i] = one_line(tokenizer.decode(output.ids, skip_special_tokens=True))
            if not output.is_finished:
                endless.add(whose[i])
        done.missing.difference_update(batch)
        done.settle()
    told.finish()
    if endless:
        _log.warning(
            f"{len(endless):,} of {len(texts):,} translations have no end and were cut off at their greatest length: "
            f"of {_named('text', endless)}"
        )
    return done.texts


class _InOrder:
    """Buffer that emits translations in the order of the texts, each as soon as it and all earlier ones are done."""

    def __init__(
        self,
        parts: Sequence[Sequence[str]],  # pieces of each text
        found: Sequence[str],  # translations of all pieces, in the order of the texts; filled by the caller
        missing: set[int],  # indices of the pieces that are not translated yet; updated by the caller
        each: Callable[[str], None] | None,  # called with each translation; None: nothing is called
    ) -> None:
        self._parts, self._found, self._each, self._at = parts, found, each, 0
        self.missing, self.texts = missing, list[str]()

    def settle(self) -> None:
        """Emit all translations that are done and whose predecessors are done."""
        while len(self.texts) < len(self._parts):
            own = range(self._at, self._at + len(self._parts[len(self.texts)]))
            if not self.missing.isdisjoint(own):
                return
            self.texts.append(_joined(self._found[own.start : own.stop]))
            self._at = own.stop
            if self._each is not None:
                self._each(self.texts[-1])


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Pieces of a text that fit: cut behind a sentence, else at a blank, else anywhere, each time nearest to the
    middle."""
    if len(text) < 2 or fits(text):
        return [text]
    cut = len(text) // 2
    for pattern in (_SENTENCE, _BLANKS):
        if ends := [m.end() for m in pattern.finditer(text) if m.end() < len(text)]:
            cut = min(ends, key=lambda end: abs(2 * end - len(text)))
            break
    return [*split_text(text[:cut].rstrip(), fits), *split_text(text[cut:], fits)]


def _joined(parts: Sequence[str]) -> str:
    """Pieces joined by blanks, but without a blank behind a full-width end of a sentence."""
    return re.sub(r"(?<=[。！？]) ", "", " ".join(parts)) if len(parts) > 1 else parts[0]


def _named(what: str, numbers: Iterable[int]) -> str:
    """Enumeration such as "texts 1, 4 and 9 more"."""
    ordered = sorted(numbers)
    shown = ", ".join(map(str, ordered[:_NAMED]))
    more = f" and {len(ordered) - _NAMED:,} more" if len(ordered) > _NAMED else ""
    return f"{what}{'s' if len(ordered) > 1 else ''} {shown}{more}"


def _check_lengths(lengths: Mapping[int, int], limit: int) -> None:
    """Raise one ConfigError that names every text which is too long, before any is translated."""
    long = [number for number, length in lengths.items() if length > limit]
    if not long:
        return
    has = "has" if len(long) == 1 else "have up to"
    raise ConfigError(
        f"{_named('text', long)}: {has} {max(lengths.values())} tokens and the model reads at most {limit}; shorten "
        "what is longer,"
        f" or have it translated in pieces by {named('split_long', True)}"
    )


def one_line(text: str) -> str:
    """Generated text as one line: line breaks become blanks."""
    return text.replace("\r", " ").replace("\n", " ").strip()
