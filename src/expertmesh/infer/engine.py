"""Generation: prompts in, tokens out one by one, with a key-value cache."""

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.infer.cache import KVCache
from expertmesh.infer.sampling import Sampling, choose, draw_uniform, sequence_generators
from expertmesh.infer.text import TextStream
from expertmesh.models.gpt.model import GPT
from expertmesh.ops.dtypes import autocast_dtype


def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
) -> Iterator[int]:
    """Continue one prompt; see `generate_batch`.

    Returns:
        Iterator of the new token ids, the end-of-text id excluded.
    """
    steps = generate_batch(
        model, [prompt_ids], max_new_tokens=max_new_tokens, sampling=sampling, eos_id=eos_id
    )
    return (step[0] for step in steps if step[0] is not None)


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    start_id: int | None = None,
) -> Iterator[str]:
    """Continue a text.

    Args:
        model: as `generate_batch`.
        tokenizer: byte-level BPE of the model.
        prompt: not empty.
        max_new_tokens: as `generate_batch`.
        sampling: as `generate_batch`.
        eos_id: as `generate_batch`.
        start_id: put before the prompt, to say that a document begins; None: nothing.

    Returns:
        Iterator of the pieces of the continuation, none of them empty, cut between characters.

    Raises:
        ConfigError: as `generate_batch`, at once and not at the first token.
    """
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if prompt_ids and start_id is not None:
        prompt_ids = [start_id, *prompt_ids]
    ids = generate(
        model, prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling, eos_id=eos_id
    )
    return _text_pieces(ids, TextStream(tokenizer))


def _text_pieces(ids: Iterator[int], stream: TextStream) -> Iterator[str]:
    for token_id in ids:
        piece = stream.feed(token_id)
        if piece:
            yield piece
    rest = stream.finish()
    if rest:
        yield rest


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts of any lengths together.

    Shorter prompts are padded on the left; the padding is masked out of attention and experts. Sequence i draws from a
    generator seeded with sampling.seed + i, so what it gets depends on its own prompt and place alone (with a dropless
    model; its logits to rounding, or to the bit where the model's config has batch_invariant). Sets the model to evaluation mode while it computes. Synchronises with the device once per token.

    Args:
        model: the language model.
        prompts: token ids, none of them empty.
        max_new_tokens: most tokens to generate for each; None: as many as the longest prompt leaves room for.
        sampling: how to choose tokens; None: greedy.
        eos_id: a sequence ends before this token; None: only at max_new_tokens.

    Returns:
        Iterator over steps: the next token of every sequence, None for those that have ended.

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, max_new_tokens below 1, or more tokens than the
            model's max_seq_len. Raised at once and not at the first token.
        CheckpointError: while generating, when the model's logits are not finite.
    """
    sampling = Sampling(greedy=True) if sampling is None else sampling
    _check_prompts(model, prompts)
    new_tokens = _room(model, prompts, max_new_tokens=max_new_tokens)
    return _steps(model, prompts, new_tokens=new_tokens, sampling=sampling, eos_id=eos_id)


def _check_prompts(model: GPT, prompts: Sequence[Sequence[int]]) -> None:
    vocab = model.config.vocab_size
    if not prompts:
        raise ConfigError("prompts=[]: there is nothing to continue; give at least one prompt")
    for prompt in prompts:
        if not len(prompt):
            raise ConfigError("prompt='': is empty; give at least one token to continue")
        wrong = [token_id for token_id in prompt if not 0 <= token_id < vocab]
        if wrong:
            raise ConfigError(
                f"token id {wrong[0]}: must be from 0 to {vocab - 1}; use the tokenizer the model was trained with"
            )


def _room(model: GPT, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | None) -> int:
    """The number of new tokens, checked against the longest prompt."""
    limit, longest = model.config.max_seq_len, max(len(prompt) for prompt in prompts)
    if longest >= limit:
        raise ConfigError(
            f"prompt of {longest} tokens: must be shorter than the model's max_seq_len={limit}; shorten the prompt"
        )
    new_tokens = limit - longest if max_new_tokens is None else max_new_tokens
    if new_tokens < 1:
        raise ConfigError(
            f"max_new_tokens={new_tokens}: must be at least 1; ask for a token or more"
        )
    if longest + new_tokens > limit:
        raise ConfigError(
            f"max_new_tokens={new_tokens}: with a prompt of {longest} tokens it passes the model's max_seq_len={limit};"
            f" ask for at most {limit - longest}"
        )
    return new_tokens


def _steps(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    sampling: Sampling,
    eos_id: int | None,
) -> Iterator[list[int | None]]:
    device = model.embedding.weight.device
    ids_BS, token_mask_BS = pad_left(prompts, device=device)
    cache: KVCache | None = None
    generators = sequence_generators(sampling.seed, len(prompts))
    running = [True] * len(prompts)
    for _ in range(new_tokens):
        if cache is None:
            cache = new_cache(model, batch_size=len(prompts), max_len=ids_BS.shape[1] + new_tokens)
        logits_BV = next_logits(model, ids_BS, token_mask_BS=token_mask_BS, cache=cache)
        if not torch.isfinite(logits_BV).all():
            raise CheckpointError(
                f"logits after {cache.length} tokens are not finite: the weights are damaged, or the compute dtype is too"
                " small for them; use another checkpoint or float32"
            )
        uniform_B = None if sampling.greedy else draw_uniform(generators)
        chosen_B = choose(logits_BV, sampling, uniform_B=uniform_B)
        step: list[int | None] = []
        for index, token_id in enumerate(chosen_B.tolist()):
            running[index] = running[index] and token_id != eos_id
            step.append(token_id if running[index] else None)
        if not any(running):
            return
        yield step
        # Ended sequences stay in the batch as padding, so that no shape depends on the data.
        ids_BS = chosen_B[:, None]
        token_mask_BS = None
        if not all(running):
            token_mask_BS = torch.tensor(running, device=device)[:, None]


def pad_left(
    prompts: Sequence[Sequence[int]], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Prompts as one batch, aligned at their ends.

    Args:
        prompts: token ids.
        device: of the result.

    Returns:
        (B, S) int64 ids, 0 where padded, and the (B, S) bool mask, False where padded; None if nothing is.
    """
    longest = max(len(prompt) for prompt in prompts)
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids_BS = torch.tensor(rows, dtype=torch.int64, device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return ids_BS, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    columns = torch.arange(longest, device=device)
    return ids_BS, columns >= longest - lengths[:, None]


def new_cache(model: GPT, *, batch_size: int, max_len: int) -> KVCache:
    """A cache in the dtype that the model's attention computes in: its own, or autocast's where that is on."""
    weight = model.embedding.weight
    dtype = autocast_dtype(weight.device) or weight.dtype
    return KVCache(
        model.config, batch_size=batch_size, max_len=max_len, device=weight.device, dtype=dtype
    )


@torch.no_grad()
def next_logits(
    model: GPT, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: KVCache
) -> Tensor:
    """(B, V) logits of the token after the last column, in evaluation mode; the model's mode is put back."""
    if not model.training:
        return model(ids_BS, token_mask_BS=token_mask_BS, cache=cache, num_logits=1).logits_BSV[
            :, 0
        ]
    model.eval()
    try:
        return next_logits(model, ids_BS, token_mask_BS=token_mask_BS, cache=cache)
    finally:
        model.train()
