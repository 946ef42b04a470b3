"""Lockstep generation: a rectangular batch with a dense cache, for models without support for the paged cache.

These are model families outside this package, and GPTs with expert-choice routers or a bound on the capacity.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expertmesh.config.sampling import SamplingParams
from expertmesh.config.values import WHOLE, Number, type_of
from expertmesh.engine.checks import ids_of_prompts, params_for_each, params_of, room_for
from expertmesh.engine.drawing import FILTERS, SamplingNumbers
from expertmesh.engine.output import NOT_FINITE, RequestOutput
from expertmesh.engine.stops import AnswerText
from expertmesh.errors import ConfigError
from expertmesh.models.decoder import CausalLM, EncoderDecoder, evaluating
from expertmesh.moe.init import draw_seed
from expertmesh.ops.sampling import draw
from expertmesh.parallel.inference import broadcast_from_rank0

_SERVED = {
    *FILTERS,
    *("temperature", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
    "kept_special_ids",
}


class Lockstep:
    """Answers prompts batch by batch, with the methods `as_they_end` and `stream` of `Engine`."""

    def __init__(
        self,
        model: CausalLM,  # any language model
        tokenizer: Tokenizer | None = None,  # tokenizer of the model; None: answers have no text
        *,
        end_ids: Sequence[int] = (),  # end tokens in addition to the model's
        batch_size: int = 32,  # prompts that are answered together; the longest of them limits the new tokens of all
    ) -> None:
        if isinstance(model, EncoderDecoder):
            raise ConfigError(f"model is {type_of(model)}, which reads one text and writes another; translate with it")
        Number(1, fix="32 is usual", types=WHOLE).check("batch_size", batch_size)
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self._end_ids = frozenset({*end_ids, *getattr(model, "end_ids", ())})

    def as_they_end(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> Generator[tuple[int, list[RequestOutput]], None, None]:
        """Answer prompts: yields each one's index and its answer, in order, when its batch has ended.

        Args:
            prompts: token ids, none of them empty.
            params: parameters of all prompts, or one for each; n, penalties, biases, min_tokens, logprobs and routed
                experts are not supported.
        """
        prompts = ids_of_prompts(prompts, self.model.vocab_size)
        each = params_for_each(params, len(prompts))
        rooms = self._check(prompts, each)

        def batches() -> Generator[tuple[int, list[RequestOutput]], None, None]:
            for first in range(0, len(prompts), self.batch_size):
                part = slice(first, first + self.batch_size)
                *_, last = self._answers(prompts[part], each[part], rooms[part])
                yield from ((first + row, [output]) for row, output in enumerate(last))

        return batches()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        """Answer a prompt as a stream: yields the answer so far after each token."""
        prompts, each = ids_of_prompts([prompt], self.model.vocab_size), [params_of(params)]
        rooms = self._check(prompts, each)
        return (one for (one,) in self._answers(prompts, each, rooms))

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> list[int]:
        """Checked maximum number of tokens of each answer."""
        for one in params:
            for name in SamplingParams.model_fields:
                if name not in _SERVED and getattr(one, name) != getattr(SamplingParams(), name):
                    raise ConfigError(
                        name,
                        repr(getattr(one, name)),
                        f"is not served for {type_of(self.model)}, which the engine cannot page",
                        "leave it out",
                    )
        return [room_for(self.model, prompt, one.max_tokens) for prompt, one in zip(prompts, params, strict=True)]

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        rooms: Sequence[int],
    ) -> Iterator[list[RequestOutput]]:
        """All answers so far, after each step."""
        left = self.model.max_seq_len - max(map(len, prompts))  # the batch is a rectangle
        rooms = [min(room, left) for room in rooms]
        texts = [AnswerText(self.tokenizer, one.stop, one.kept_special_ids) for one in params]
        ends = [frozenset(one.stop_token_ids) | (frozenset() if one.ignore_eos else self._end_ids) for one in params]
        ids: list[list[int]] = [[] for _ in prompts]
        reasons: list[str | None] = [None] * len(prompts)
        errors: list[str | None] = [None] * len(prompts)
        for step in self._steps(prompts, params, max(rooms), reasons):
            for row, (token, is_finite) in enumerate(step):
                if reasons[row] is not None:
                    continue
                if not is_finite:
                    reasons[row] = "error"
                    errors[row] = NOT_FINITE.format(len(prompts[row]) + len(ids[row]))
                    continue
                ids[row].append(token)
                if token in ends[row]:
                    reasons[row] = "stop"
                else:
                    texts[row].feed(token)
                    is_full = len(ids[row]) == rooms[row]
                    reasons[row] = "stop" if texts[row].is_stopped else "length" if is_full else None
                if reasons[row] is not None:
                    texts[row].finish()
            yield [
                RequestOutput(
                    str(row),
                    0,
                    tuple(prompt),
                    tuple(ids[row]),
                    texts[row].settled if reasons[row] is None else texts[row].text,
                    reasons[row],  # type: ignore[arg-type]
                    errors[row],
                    stop_string=texts[row].stop,
                )
                for row, prompt in enumerate(prompts)
            ]

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        num_steps: int,
        reasons: Sequence[str | None],
    ) -> Iterator[list[tuple[int, bool]]]:
        """(token, whether its logits are finite) of every row; ends when `reasons` has a reason for every row."""
        model, device = self.model, self.model.device
        ids_BS, token_mask_BS = pad_prompts(prompts, "left", device=device)
        cache: Any = None
        batch = SamplingNumbers.of(
            params,
            seeds=[draw_seed() if one.seed is None else one.seed for one in params],
            answers=[0] * len(params),
            positions=[0] * len(params),
        ).on(device)
        from_rank0 = broadcast_from_rank0(model)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        for number in range(num_steps):
            with evaluating(model), torch.no_grad():
                if cache is None:
                    length = ids_BS.shape[1] + num_steps
                    cache = model.new_cache(batch_size=len(prompts), max_len=length)
                logits_BV = model.next_logits(ids_BS, token_mask_BS=token_mask_BS, cache=cache)
                chosen_B = draw(logits_BV, replace(batch, position_R=lengths_B + number))
                is_finite_B = logits_BV.isfinite().all(-1)
                agreed_2B = from_rank0(torch.stack((chosen_B, is_finite_B.long())))
            chosen, finite = agreed_2B.tolist()
            yield list(zip(chosen, map(bool, finite), strict=True))
            running = [reason is None for reason in reasons]
            if not any(running):
                return
            # Finished sequences stay in the batch as padding, so that shapes do not depend on the data.
            ids_BS = agreed_2B[0][:, None]
            token_mask_BS = None
            if not all(running):
                token_mask_BS = torch.tensor(running, device=device)[:, None]


def pad_prompts(
    prompts: Sequence[Sequence[int]], side: Literal["left", "right"], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor | None]:
    """Prompts as a batch, padded on one side.

    Returns:
        (B, S) int64 ids, 0 where padded, and a (B, S) bool mask, False where padded; None without padding.
    """
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    rows = [torch.tensor(list(prompt), dtype=torch.int64) for prompt in prompts]
    ids_BS = pad(rows).to(device)
    if len(set(map(len, rows))) == 1:
        return ids_BS, None
    return ids_BS, pad([torch.ones_like(row, dtype=torch.bool) for row in rows]).to(device)
