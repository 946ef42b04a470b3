"""Translation of texts by an encoder-decoder: tokens, batches of about one length, beam search, text again."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from expertmesh.data.news import Progress
from expertmesh.errors import ConfigError
from expertmesh.infer.beam import beam_search
from expertmesh.models.decoder import CausalLM, EncoderDecoder, Translation

_NAMED = 20
"""Texts that are too long whose numbers a message says."""


def translate(
    model: CausalLM,
    tokenizer: Tokenizer,
    translation: Translation,
    texts: Sequence[str],
    *,
    num_beams: int = 5,
    length_penalty: float = 1.0,
    batch_size: int = 32,
    max_tokens: int | None = None,
) -> list[str]:
    """The texts in another language, in their order; a blank one stays blank.

    Args:
        model: an encoder-decoder.
        tokenizer: of the model.
        translation: how it is asked for a language: `expertmesh.models.family.Task.translation`.
        texts: one line each.
        num_beams: see `beam_search`.
        length_penalty: see `beam_search`.
        batch_size: texts that are translated together.
        max_tokens: see `beam_search`; None: twice the tokens of each text and 16 more, at most what the model has room for.

    Raises:
        ConfigError: the model is no encoder-decoder, texts are too long for it, or a value breaks a rule.
    """
    if not isinstance(model, EncoderDecoder):
        raise ConfigError(f"a {type(model).__name__} reads no sources; use an encoder-decoder")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1; 32 is usual")
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    sources = [[*translation.before, *encoding.ids, *translation.after] for encoding in encoded]
    order = sorted(
        (i for i, text in enumerate(texts) if text.strip()), key=lambda i: len(sources[i])
    )
    _check_lengths({i + 1: len(sources[i]) for i in order}, model.max_source_len)
    room = model.max_seq_len - len(translation.start)
    found = [""] * len(texts)
    told = Progress("translated", total=len(order), unit="texts")
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
    told.finish()
    return found


def _check_lengths(lengths: Mapping[int, int], limit: int) -> None:
    """All that are too long are named by their numbers, so that they are found at one start, before any work."""
    long = sorted(number for number, length in lengths.items() if length > limit)
    if not long:
        return
    most = max(lengths.values())
    named = ", ".join(map(str, long[:_NAMED]))
    named += f" and {len(long) - _NAMED:,} more" if len(long) > _NAMED else ""
    who = f"text {named}: has" if len(long) == 1 else f"texts {named}: have up to"
    raise ConfigError(
        f"{who} {most} tokens and the model reads at most {limit}; shorten what is longer, or give sentences one by one"
    )


def one_line(text: str) -> str:
    """What a model has written as one line of a file, whatever ends of lines it has."""
    return text.replace("\r", " ").replace("\n", " ").strip()
