"""Text generation for models of any kind: with the engine if it supports the model, else in lockstep."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.awaited import AnswerIterator
from expertmesh.engine.checks import check_text, ids_of_prompts, why_not
from expertmesh.engine.engine import Engine
from expertmesh.engine.lockstep import Lockstep
from expertmesh.engine.output import RequestOutput
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.decoder import evaluating
from expertmesh.text.format import TextFormat

T = TypeVar("T")


def writer(
    model: Any,  # a `CausalLM`, perhaps sharded by `spread_for_inference`; then every rank must make the same calls
    text: TextFormat | None = None,  # text format of the model; None: answers have no text
    *,
    batch_size: int = 32,  # number of answers computed together
    num_draft_tokens: int = 0,  # draft tokens of the engine, see `EngineConfig`
) -> Engine | Lockstep:
    """Engine, or `Lockstep` for models that the engine does not support."""
    tokenizer, ends = (None, ()) if text is None else (text.tokenizer, text.end_ids)
    lockstep = Lockstep(model, tokenizer, end_ids=ends, batch_size=batch_size)
    if problem := why_not(model):
        if num_draft_tokens:
            raise ConfigError("num_draft_tokens", num_draft_tokens, problem, "leave it out")
        return lockstep
    # compiling takes longer than most texts, and would change bits in the middle of them
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
    """Continue several prompts."""
    return list(continued(model, prompts, params, **options))


def continued(
    model: Any,  # see `writer`
    prompts: Sequence[Sequence[int]],  # token ids, none of them empty
    params: SamplingParams,  # parameters of all prompts; see `SamplingParams.seed`
    *,
    text: TextFormat | None = None,  # see `writer`
    batch_size: int = 32,  # prompts that are continued together; it does not change their random numbers
    by: Engine | None = None,  # engine of this model; None: a new one
    adapter: str | None = None,  # adapter of that engine; None: the model alone
) -> AnswerIterator[RequestOutput]:
    """Continue several prompts; yields each answer once it and all before it have ended. The model is in evaluation
    mode meanwhile. Closing or dropping the iterator aborts the others."""
    prompts = ids_of_prompts(prompts, model.vocab_size)
    with evaluating(model):
        answering = by or writer(model, text, batch_size=batch_size)
        ended = answering.as_they_end(prompts, params, **_chosen(adapter))
    return AnswerIterator(_in_order(model, ended), ended.close)


def _in_order(model: Any, ended: Iterator[tuple[int, list[RequestOutput]]]) -> Iterator[RequestOutput]:
    known: dict[int, RequestOutput] = {}
    following = 0
    for place, (answer,) in _evaluated(model, ended):
        known[place] = answer
        while following in known:
            output = known.pop(following)
            _check(output)
            yield output
            following += 1


def _evaluated(model: Any, answers: Iterator[T]) -> Iterator[T]:
    """Answers, each computed in evaluation mode; the consumer may train the model between them."""
    while True:
        with evaluating(model):
            one = next(answers, None)
        if one is None:
            return
        yield one


def _chosen(adapter: str | None) -> dict[str, Any]:
    """Adapter argument for an engine; empty without an adapter, because `Lockstep` has no such argument."""
    return {} if adapter is None else {"adapter": adapter}


def stream_text(
    model: Any,  # see `writer`
    prompt: Sequence[int],  # token ids, not empty
    params: SamplingParams,
    *,
    text: TextFormat,  # text format of the model
    by: Engine | None = None,  # see `continued`
    adapter: str | None = None,  # see `continued`
) -> AnswerIterator[str]:
    """Continue a prompt as a stream. Closing or dropping the iterator aborts it."""
    (prompt,) = ids_of_prompts([prompt], model.vocab_size)
    with evaluating(model):
        outputs = (by or writer(model, text, batch_size=1)).stream(prompt, params, **_chosen(adapter))
    return AnswerIterator(_pieces(model, outputs), outputs.close)


def _pieces(model: Any, outputs: Iterator[RequestOutput]) -> Iterator[str]:
    said = 0
    for output in _evaluated(model, outputs):
        _check(output)
        if len(output.text) > said:
            yield output.text[said:]
            said = len(output.text)


def prompt_ids(text: TextFormat, prompt: str, *, start: bool = True) -> list[int]:
    """Tokens of a text to continue, after the model's start tokens. `prompt`: a nonempty text."""
    check_text(prompt)
    if not prompt:
        raise ConfigError("prompt='': is empty; give at least one token")
    if start:
        return text.prompt_ids(prompt)
    return text.ids_of(prompt)


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise CheckpointError(output.error)
