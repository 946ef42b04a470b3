"""Generation: prompts in, tokens out one by one, with a key-value cache."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expertmesh.data.news import Progress
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.infer.sampling import (
    Sampling,
    choose,
    draw_uniform,
    is_number,
    sequence_generators,
)
from expertmesh.models.decoder import CausalLM, EncoderDecoder
from expertmesh.parallel.inference import first_chooses
from expertmesh.text.stream import TextStream


def generate(
    model: CausalLM,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[int]:
    """Continue one prompt; see `generate_batch`.

    Returns:
        Iterator of the new token ids, the end-of-text id excluded.
    """
    steps = generate_batch(
        model, [prompt_ids], max_tokens=max_tokens, sampling=sampling, eos_id=eos_id
    )
    return (step[0] for step in steps if step[0] is not None)


def generate_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | Collection[int] | None = None,
    start: Sequence[int] = (),
) -> Iterator[str]:
    """Continue a text.

    Args:
        model: the model, as for `generate_batch`.
        tokenizer: of the model.
        prompt: not empty; or its token ids, before which nothing is put.
        max_tokens: the most tokens to append, as for `generate_batch`.
        sampling: the rule of sampling, as for `generate_batch`.
        eos_id: the token, or tokens, that end a text, as for `generate_batch`.
        start: tokens put before the prompt, to say that a document begins.

    Returns:
        Iterator of the pieces of the continuation, none of them empty, cut between characters.

    Raises:
        ConfigError: as `generate_batch`, at once and not at the first token.
    """
    prompt_ids = _encoded(tokenizer, prompt, start)
    ids = generate(model, prompt_ids, max_tokens=max_tokens, sampling=sampling, eos_id=eos_id)
    return _text_pieces(ids, TextStream(tokenizer))


def _encoded(tokenizer: Tokenizer, prompt: str | Sequence[int], start: Sequence[int]) -> list[int]:
    """The ids of a prompt; an empty one stays empty, and is refused later."""
    if not isinstance(prompt, str):
        return list(prompt)
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ConfigError(
            f"prompt: {ascii(prompt)[:60]} is no text (it holds half a character, or bytes that are not UTF-8); give text in UTF-8"
        )
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    return [*start, *ids] if ids else ids


def generate_texts(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | Collection[int] | None = None,
    start: Sequence[int] = (),
    batch_size: int = 32,
) -> list[str]:
    """Continue several texts; other arguments and errors as `generate_text` has them.

    Args:
        batch_size: texts that are continued together; each draws the same numbers whatever it is.

    Returns:
        One continuation for each prompt, in their order.
    """
    if not is_number(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r}: must be at least 1, and whole; 32 is usual")
    sampling = Sampling(greedy=True) if sampling is None else sampling
    ids = [_encoded(tokenizer, prompt, start) for prompt in prompts]
    new_tokens = _checked(model, ids, max_tokens=max_tokens)
    new: list[list[int]] = [[] for _ in ids]
    told = Progress("continued", total=len(ids), unit="texts")
    for first in range(0, len(ids), batch_size):
        told.at(first)
        steps = generate_batch(
            model,
            ids[first : first + batch_size],
            max_tokens=new_tokens,
            sampling=replace(sampling, seed=(sampling.seed + first) % 2**63),
            eos_id=eos_id,
        )
        for step in steps:
            for place, token_id in enumerate(step, first):
                if token_id is not None:
                    new[place].append(token_id)
    told.finish()
    return ["".join(_text_pieces(iter(one), TextStream(tokenizer))) for one in new]


def _text_pieces(ids: Iterator[int], stream: TextStream) -> Iterator[str]:
    for token_id in ids:
        piece = stream.feed(token_id)
        if piece:
            yield piece
    rest = stream.finish()
    if rest:
        yield rest


def generate_batch(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    sources: Sequence[Sequence[int]] | None = None,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts of any lengths together; of an encoder-decoder, each under its own source.

    Shorter prompts are padded on the left; the padding is masked out of attention and experts. Sequence i draws from a
    generator seeded with sampling.seed + i, so what it gets depends on its own prompt and place alone (unless
    experts choose or max_capacity_factor bounds them; its logits to rounding, or to the bit where the model's config has batch_invariant). Sets the model to evaluation mode while it computes. Synchronises with the device once per token.

    Args:
        model: the language model, or encoder-decoder.
        prompts: token ids, none of them empty. Those of an encoder-decoder are the beginnings of its outputs.
        sources: token ids that an encoder-decoder reads first, one list per prompt.
        max_tokens: most tokens to generate for each; None: as many as the longest prompt leaves room for.
        sampling: how to choose tokens; None: greedy.
        eos_id: a sequence ends before this token, or any of these, and before those that the model names (`end_ids`); None:
            only at max_tokens.

    Returns:
        Iterator over steps: the next token of every sequence, None for those that have ended.

    Raises:
        ConfigError: an empty prompt or source, an id outside the vocabulary, max_tokens below 1, more tokens than the
            model's max_seq_len or max_source_len, or sources that the model cannot read, or lacks. Raised at once and
            not at the first token.
        CheckpointError: while generating, when the model's logits are not finite.
    """
    sampling = Sampling(greedy=True) if sampling is None else sampling
    new_tokens = _checked(model, prompts, max_tokens=max_tokens)
    check_sources(model, sources, num_prompts=len(prompts))
    return _steps(model, prompts, sources, new_tokens=new_tokens, sampling=sampling, eos_id=eos_id)


def _checked(model: CausalLM, prompts: Sequence[Sequence[int]], *, max_tokens: int | None) -> int:
    """The number of new tokens; errors of prompts as `generate_batch` has them."""
    if not prompts:
        raise ConfigError("prompts=[]: there is nothing to continue; give at least one prompt")
    _check_ids(model, prompts, what="prompt")
    return check_room(model, prompts, max_tokens=max_tokens)


def check_sources(
    model: CausalLM, sources: Sequence[Sequence[int]] | None, *, num_prompts: int
) -> None:
    """Whether the model reads sources, and can read these, one per prompt.

    Raises:
        ConfigError: it does not, or cannot.
    """
    if not isinstance(model, EncoderDecoder):
        if sources is not None:
            raise ConfigError(
                f"sources: a {type(model).__name__} reads none; put them before the prompts"
            )
        return
    if sources is None or len(sources) != num_prompts:
        raise ConfigError(
            f"sources: {0 if sources is None else len(sources)} for {num_prompts} prompts; give one per prompt"
        )
    _check_ids(model, sources, what="source")
    longest = max(map(len, sources))
    if longest > model.max_source_len:
        raise ConfigError(
            f"source of {longest} tokens: the model reads at most {model.max_source_len}; shorten it"
        )


def _check_ids(model: CausalLM, prompts: Sequence[Sequence[int]], *, what: str) -> None:
    vocab = model.vocab_size
    for prompt in prompts:
        if not len(prompt):
            raise ConfigError(f"{what}='': is empty; give at least one token")
        wrong = [token_id for token_id in prompt if not 0 <= token_id < vocab]
        if wrong:
            raise ConfigError(
                f"token id {wrong[0]}: must be from 0 to {vocab - 1}; use the tokenizer the model was trained with"
            )


def check_room(model: CausalLM, prompts: Sequence[Sequence[int]], *, max_tokens: int | None) -> int:
    """The number of new tokens, checked against the longest prompt.

    Raises:
        ConfigError: they do not fit the model's longest sequence.
    """
    limit, longest = model.max_seq_len, max(len(prompt) for prompt in prompts)
    if longest >= limit:
        raise ConfigError(
            f"prompt of {longest} tokens: must be shorter than the model's max_seq_len={limit}; shorten the prompt"
        )
    new_tokens = limit - longest if max_tokens is None else max_tokens
    if not is_number(new_tokens, int) or new_tokens < 1:
        raise ConfigError(
            "max_tokens",
            repr(new_tokens),
            "must be at least 1, and whole",
            "ask for a token or more",
        )
    if longest + new_tokens > limit:
        raise ConfigError(
            "max_tokens",
            new_tokens,
            f"with a prompt of {longest} tokens it passes the model's max_seq_len={limit}",
            f"ask for at most {limit - longest}",
        )
    return new_tokens


def _steps(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]] | None,
    *,
    new_tokens: int,
    sampling: Sampling,
    eos_id: int | Collection[int] | None,
) -> Iterator[list[int | None]]:
    device = model.device
    ids_BS, token_mask_BS = pad_left(prompts, device=device)
    max_len = ids_BS.shape[1] + new_tokens
    ends: set[int] = set()
    if eos_id is not None:
        given = (eos_id,) if isinstance(eos_id, int) else eos_id
        ends = {*given, *getattr(model, "end_ids", ())}
    cache: Any = None
    generators = sequence_generators(sampling.seed, len(prompts))
    running = [True] * len(prompts)
    as_first = first_chooses(model)
    for _ in range(new_tokens):
        if cache is None:
            cache = model.new_cache(batch_size=len(prompts), max_len=max_len)
            if isinstance(model, EncoderDecoder) and sources is not None:
                source_BS, source_mask_BS = pad_right(sources, device=device)
                with evaluating(model):
                    model.encode(source_BS, token_mask_BS=source_mask_BS, cache=cache)
        # copied while a GPU has nothing to do: behind the model's launches the host would wait for them
        uniform_B = None if sampling.greedy else draw_uniform(generators).to(device)
        with evaluating(model):
            logits_BV = model.next_logits(ids_BS, token_mask_BS=token_mask_BS, cache=cache)
        chosen_B = choose(logits_BV, sampling, uniform_B=uniform_B)
        is_finite = torch.isfinite(logits_BV).all()
        agreed = as_first(torch.cat((chosen_B, is_finite[None])))
        *chosen, all_finite = agreed.tolist()
        if not all_finite:
            raise CheckpointError(
                f"logits after {cache.length} tokens are not finite: the weights are damaged, or the compute dtype is too"
                " small for them; use another checkpoint or float32"
            )
        step: list[int | None] = []
        for index, token_id in enumerate(chosen):
            running[index] = running[index] and token_id not in ends
            step.append(token_id if running[index] else None)
        if not any(running):
            return
        yield step
        # Ended sequences stay in the batch as padding, so that no shape depends on the data.
        ids_BS = agreed[:-1, None]
        token_mask_BS = None
        if not all(running):
            token_mask_BS = torch.tensor(running, device=device)[:, None]


def pad_left(
    prompts: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Prompts as one batch, aligned at their ends.

    Args:
        prompts: token ids.
        device: the device of the result.

    Returns:
        (B, S) int64 ids, 0 where padded, and the (B, S) bool mask, False where padded; None if nothing is.
    """
    return _padded(prompts, side="left", device=device)


def pad_right(
    prompts: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same, aligned at their beginnings."""
    return _padded(prompts, side="right", device=device)


def _padded(
    prompts: Sequence[Sequence[int]], *, side: str, device: torch.device | str | None
) -> tuple[Tensor, Tensor | None]:
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    rows = [torch.tensor(list(prompt), dtype=torch.int64) for prompt in prompts]
    ids_BS = pad(rows).to(device)
    if len(set(map(len, rows))) == 1:
        return ids_BS, None
    return ids_BS, pad([torch.ones_like(row, dtype=torch.bool) for row in rows]).to(device)


@contextmanager
def evaluating(model: CausalLM) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before is put back."""
    was_training = model.training
    if was_training:
        model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            model.train()
