"""Texts continued by a model, of whatever kind: by the engine where it serves the model, else in step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from expertmesh.engine.checks import check_prompts, check_text, why_not
from expertmesh.engine.engine import Engine
from expertmesh.engine.lockstep import Lockstep
from expertmesh.engine.output import RequestOutput
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.decoder import evaluating
from expertmesh.text.format import TextFormat


def writer(
    model: Any,
    text: TextFormat | None = None,
    *,
    batch_size: int = 32,
    num_draft_tokens: int = 0,
) -> Engine | Lockstep:
    """What answers prompts with a model in evaluation mode.

    Args:
        model: a `CausalLM`, perhaps spread by `spread_for_inference`; then every rank makes one and asks for the same.
        text: of the model; None: answers have no text.
        batch_size: answers that are computed together.
        num_draft_tokens: tokens that the engine guesses at a time, see `EngineConfig`.

    Raises:
        ConfigError: tokens are to be guessed for a model that the engine does not serve.
    """
    tokenizer, ends = (None, ()) if text is None else (text.tokenizer, text.end_ids)
    lockstep = Lockstep(model, tokenizer, end_ids=ends, batch_size=batch_size)
    if problem := why_not(model):
        if num_draft_tokens:
            raise ConfigError("num_draft_tokens", num_draft_tokens, problem, "leave it out")
        return lockstep
    # compiling takes longer than most texts, and would change their bits on the way
    return Engine(
        model,
        tokenizer,
        end_ids=ends,
        max_sequences=batch_size,
        num_draft_tokens=num_draft_tokens,
        compile=False,
    )


def continue_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    **options: Any,
) -> list[RequestOutput]:
    """Continue several prompts.

    Returns:
        What `continued` gives, when all have ended.

    Raises:
        ConfigError: see there.
        CheckpointError: the model's logits are not finite.
    """
    return list(continued(model, prompts, params, **options))


def continued(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    text: TextFormat | None = None,
    batch_size: int = 32,
    by: Engine | None = None,
    adapter: str | None = None,
) -> Iterator[RequestOutput]:
    """Continue several prompts, and give each answer when it and those before it have ended. Sets the model to evaluation mode while
    it computes.

    Args:
        model: see `writer`.
        prompts: token ids, none of them empty.
        params: for all; prompt i draws with seed + i.
        text: see `writer`.
        batch_size: prompts that are continued together; each draws the same numbers whatever it is.
        by: the engine that answers, of this model; None: one that is made.
        adapter: of that engine, that answers; None: the model alone.

    Returns:
        Iterator of one answer for each prompt, in their order.

    Raises:
        ConfigError: an empty or too long prompt, an id outside the vocabulary, or an option breaks a rule; at once, before anything
            is computed.
        CheckpointError: while generating: the model's logits are not finite.
    """
    check_prompts(prompts, model.vocab_size, what="prompt")
    each = [_of(params, place) for place in range(len(prompts))]
    with evaluating(model):
        answering = by or writer(model, text, batch_size=batch_size)
        ended = answering.as_they_end(prompts, each, **_chosen(adapter))
    return _in_order(model, ended)


def _in_order(
    model: Any, ended: Iterator[tuple[int, list[RequestOutput]]]
) -> Iterator[RequestOutput]:
    known: dict[int, RequestOutput] = {}
    place = 0
    while True:
        with evaluating(model):  # whoever takes the answers may train in between
            one = next(ended, None)
        if one is None:
            return
        known[one[0]] = one[1][0]
        while place in known:
            output = known.pop(place)
            _check(output)
            yield output
            place += 1


def _chosen(adapter: str | None) -> dict[str, Any]:
    """What an engine is told of an adapter, and others, which know none, are not."""
    return {} if adapter is None else {"adapter": adapter}


def stream_text(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    text: TextFormat,
    by: Engine | None = None,
    adapter: str | None = None,
) -> Iterator[str]:
    """Continue one prompt.

    Args:
        model: see `writer`.
        prompt: token ids, not empty.
        params: how.
        text: of the model.
        by: see `continued`.
        adapter: see there.

    Returns:
        Iterator of the pieces of the continuation, none of them empty, cut between characters.

    Raises:
        ConfigError: as `continued`, at once and not at the first token.
        CheckpointError: while generating.
    """
    check_prompts([prompt], model.vocab_size, what="prompt")
    with evaluating(model):
        outputs = (by or writer(model, text, batch_size=1)).stream(
            prompt, params, **_chosen(adapter)
        )
    return _pieces(model, outputs)


def _pieces(model: Any, outputs: Iterator[RequestOutput]) -> Iterator[str]:
    said = 0
    while True:
        with evaluating(model):  # whoever takes the pieces may train in between
            output = next(outputs, None)
        if output is None:
            return
        _check(output)
        if len(output.text) > said:
            yield output.text[said:]
            said = len(output.text)


def prompt_ids(text: TextFormat, prompt: str, *, start: bool = True) -> list[int]:
    """Tokens of a text to continue, behind those that the model's texts begin with.

    Args:
        text: of the model.
        prompt: not empty.
        start: whether anything is put before it.

    Raises:
        ConfigError: it is empty, or no text.
    """
    check_text(prompt)
    if not prompt:
        raise ConfigError("prompt='': is empty; give at least one token")
    if start:
        return text.prompt_ids(prompt)
    ids: list[int] = text.tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids


def _of(params: SamplingParams, place: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=(params.seed + place) % 2**63)


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise CheckpointError(output.error)
