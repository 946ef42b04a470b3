"""Answers of unfinished requests: text, logprobs, experts and end conditions, updated from the results of each step."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from expertmesh.engine.drafts import PromptLookup
from expertmesh.engine.groups import GroupScheduler
from expertmesh.engine.logits_rows import RunnerOutput
from expertmesh.engine.output import Logprob, RequestOutput
from expertmesh.engine.request import Request, Sequence, State
from expertmesh.engine.scheduler import Chunk, Scheduler, Step
from expertmesh.engine.stops import AnswerText
from expertmesh.engine.timing import Timing


@dataclass
class _Answer:
    """Output state of a sequence, beside the scheduler's."""

    text: AnswerText
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprob] = field(default_factory=dict)
    experts: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    error: str | None = None
    lookup: PromptLookup = field(default_factory=PromptLookup)
    timing: Timing = field(default_factory=Timing)


class Answers:
    """Answers of unfinished requests. `tokenizer`: tokenizer of the model; None: answers have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.known: dict[Sequence, _Answer] = {}  # output state of each sequence
        self.num_tokens = 0  # number of generated tokens so far

    def begin(self, request: Request) -> None:
        """Start the answers of a request."""
        for sequence in request.sequences:
            text = AnswerText(self._tokenizer, request.params.stop, request.params.kept_special_ids)
            self.known[sequence] = _Answer(text)

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Draft tokens, at most `most`, that may come next."""
        return self.known[sequence].lookup.guess(sequence.token_ids, most)

    def note_begin(self, step: Step, now: float) -> None:
        """Record the start of a step: its sequences are admitted, preempted ones are counted."""
        for chunk in step.chunks:
            for sequence in (chunk.sequence, *chunk.samples):
                if sequence in self.known and self.known[sequence].timing.admitted is None:
                    self.known[sequence].timing.admitted = now
        for sequence in step.preempted:
            self.known[sequence].timing.num_preemptions += 1

    def settle(self, step: Step, result: RunnerOutput, scheduler: Scheduler | GroupScheduler) -> list[RequestOutput]:
        """Apply the results of a step: commit tokens, end finished sequences, and return updated outputs."""
        scheduler.commit(step, result.tokens)
        for sequence, position, logprob in result.logprobs:
            answer = self.known.get(sequence)
            if answer is not None and position < sequence.num_prompt:
                answer.prompt_logprobs.setdefault(position, logprob)
            elif answer is not None:
                answer.logprobs.append(logprob)
        for chunk, ids in result.experts:
            if not chunk.sequence.is_guessed:
                self._keep_experts(chunk, ids)
        touched = []
        for sequence, token in result.tokens.items():
            if sequence.state is State.FINISHED or sequence.is_guessed:
                continue
            self._answer(sequence, token, scheduler, problem=result.broken.get(sequence))
            touched.append(sequence)
            self._accept(sequence, step, result, scheduler)
        return [self._output(sequence) for sequence in touched]

    def _keep_experts(self, chunk: Chunk, ids_of_tokens: NDArray[np.int64]) -> None:
        """Keep the experts of tokens that are computed for the first time, which gave the logprob of the next token."""
        own = self.known[chunk.sequence].experts
        for place, ids in enumerate(ids_of_tokens, chunk.start):
            own.setdefault(place, ids)
        for other in chunk.samples[1:]:  # answers that share the prompt
            self.known[other].experts |= own

    def _accept(
        self,
        sequence: Sequence,
        step: Step,
        result: RunnerOutput,
        scheduler: Scheduler | GroupScheduler,
    ) -> None:
        """Append the tokens that follow accepted draft tokens."""
        for one in step.guessed.get(sequence, ()):
            if not scheduler.accept(sequence, one, result.tokens[one]):
                return
            answer = self.known[sequence]
            answer.logprobs += [logprob for known, _, logprob in result.logprobs if known is one]
            for chunk, ids in result.experts:
                if chunk.sequence is one:
                    answer.experts.setdefault(chunk.start, ids[0])
            token = result.tokens[one]
            self._answer(sequence, token, scheduler, problem=result.broken.get(one))

    def _answer(
        self,
        sequence: Sequence,
        token: int,
        scheduler: Scheduler | GroupScheduler,
        *,
        problem: str | None,
    ) -> None:
        """Append a token to an answer, and end it if it is finished; `problem`: error of a token that cannot be
        drawn."""
        answer, request = self.known[sequence], sequence.request
        if problem is None:
            self.num_tokens += 1
            answer.timing.drew(time.perf_counter())
        num_new = len(sequence.new_ids)
        may_end = num_new > request.params.min_tokens
        if problem is not None:
            answer.error = problem.format(len(sequence.token_ids) - 1)
            sequence.token_ids.pop()
            scheduler.finish(sequence, "error")
        elif token in request.end_ids and (may_end or _is_over(sequence, token)):
            scheduler.finish(sequence, "stop")
        else:
            answer.text.feed(token, may_stop=may_end)
            if answer.text.is_stopped:
                scheduler.finish(sequence, "stop")
            elif num_new == request.max_tokens:
                scheduler.finish(sequence, "length")
            elif sequence.rule is not None and (why := sequence.rule.problem(sequence.new_ids)):
                answer.error = why
                scheduler.finish(sequence, "error")
        if sequence.state is State.FINISHED:
            answer.text.finish()

    def _output(self, sequence: Sequence) -> RequestOutput:
        answer, request = self.known[sequence], sequence.request
        params = request.params
        is_finished = sequence.state is State.FINISHED
        prompt_logprobs = None
        first = self.known[request.sequences[0]]
        if params.prompt_logprobs is not None:
            prompt_logprobs = tuple(first.prompt_logprobs.get(i) for i in range(sequence.num_prompt))
        experts = None
        if params.return_routed_experts:
            places = range(len(sequence.token_ids) - 1)
            rows = [answer.experts[i] for i in places if i in answer.experts]
            experts = torch.from_numpy(np.stack(rows)) if rows else None
        return RequestOutput(
            request.request_id,
            sequence.index,
            request.prompt_ids,
            tuple(sequence.new_ids),
            answer.text.text if is_finished else answer.text.settled,
            sequence.finish_reason,
            answer.error,
            None if params.logprobs is None else tuple(answer.logprobs),
            prompt_logprobs,
            experts,
            sequence.num_cached or 0,
            answer.text.stop,
            replace(answer.timing),
        )

    def of(self, request: Request) -> list[RequestOutput]:
        """Current outputs of a request."""
        return [self._output(sequence) for sequence in request.sequences]

    def forget(self, request: Request) -> None:
        """Drop the answers of a request."""
        for sequence in request.sequences:
            del self.known[sequence]


def _is_over(sequence: Sequence, token: int) -> bool:
    """Whether a token ends an answer before min_tokens, because its rule allows nothing else."""
    return sequence.rule is not None and token in sequence.rule.end_ids
