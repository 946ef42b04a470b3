"""Scheduler: chooses the tokens of the next step. Torch-free: no tensors, no model, no clock.

First come, first served. Running sequences continue in order of arrival, then waiting ones are admitted while token
budget, slots and blocks last. If blocks run out, the youngest running sequence is preempted: it releases its blocks and
is recomputed later. No output is lost, and the oldest sequence always continues, so none starves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from expertmesh.engine.block_pool import BlockPool
from expertmesh.engine.drafts import ahead
from expertmesh.engine.request import FinishReason, Request, Sequence, State
from expertmesh.errors import ConfigError


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step.

    Attributes:
        samples: sequences that sample a token from the logits of the last token: this one and, after a prompt, the
            other answers to it. Empty if the chunk ends before the last known token.
    """

    sequence: Sequence
    start: int  # position of the first token
    count: int  # number of tokens; keys and values of earlier tokens are in the cache
    samples: tuple[Sequence, ...]


@dataclass(frozen=True)
class Step:
    """Plan of a step."""

    chunks: tuple[Chunk, ...]  # at most one per sequence, and one per draft token
    # (from, to) blocks to copy first: shared blocks that a sequence will write
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()
    # for sequences with draft tokens, their states after one, two, ... of these.
    guessed: Mapping[Sequence, tuple[Sequence, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class Counters:
    """Counters for `Engine.stats` and metrics; a plan or a failed step counts no token."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    guessed: int = 0
    accepted: int = 0
    requests: Counter[int] = field(default_factory=Counter)
    """Requests by root prefix, which is their adapter's."""

    def __add__(self, other: "Counters") -> "Counters":
        """Sums of all counters."""
        mine, theirs = vars(self), vars(other)
        return Counters(**{name: mine[name] + theirs[name] for name in mine})


@dataclass
class Scheduler:
    """Queue of waiting sequences, running sequences, and their blocks.

    Args:
        guess: returns draft tokens of a sequence, at most the given number.
    """

    pool: BlockPool
    token_budget: int
    max_sequences: int
    reuses_prefixes: bool = True
    num_guesses: int = 0
    guess: Callable[[Sequence, int], list[int]] = lambda sequence, most: []
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    @property
    def pools(self) -> list[BlockPool]:
        """List of the block pool, with the interface of several groups."""
        return [self.pool]

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens of a sequence."""
        return -(-num_tokens // self.pool.block_size)

    def add(self, request: Request) -> None:
        """Add a request."""
        tokens = len(request.prompt_ids) + request.max_tokens
        # keys and values of the last token are never needed
        if self.blocks_for(tokens - 1) > self.pool.num_blocks:
            held = self.pool.num_blocks * self.pool.block_size
            raise ConfigError(
                f"a prompt of {len(request.prompt_ids)} tokens and max_tokens={request.max_tokens}: the cache holds "
                f"{held} tokens; ask for fewer, or make it larger (num_blocks)"
            )
        self.waiting.extend(request.sequences)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and free its blocks; a finished sequence is unchanged."""
        if sequence.state is State.FINISHED:
            return
        queue = self.running if sequence.state is State.RUNNING else self.waiting
        queue.remove(sequence)
        self.pool.release_all(sequence.blocks)
        sequence.state, sequence.finish_reason = State.FINISHED, reason

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """Plan the next step and allocate its blocks; `commit` applies its results.

        Returns:
            The step; it has no chunks only if no work is left.
        """
        budget, chunks, copies = self.token_budget, [], []
        preempted: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING or budget == 0:
                continue
            count = min(budget, len(sequence.token_ids) - sequence.num_computed)
            while not self._has_room(sequence, count):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            if sequence.state is State.RUNNING:
                copies += self._take_blocks(sequence, count)
                chunks.append(self._chunk(sequence, count))
                budget -= count
        if not preempted:
            for sequence in self._admitted(budget):
                count = min(budget, len(sequence.token_ids) - sequence.num_computed)
                copies += self._take_blocks(sequence, count)
                chunks.append(self._chunk(sequence, count))
                budget -= count
        guessed = {} if preempted else self._guessed(chunks, budget)
        for one in (one for several in guessed.values() for one in several):
            chunks.append(Chunk(one, one.num_computed, 1, (one,)))
        self.counters.preemptions += len(preempted)
        return Step(tuple(chunks), tuple(copies), tuple(preempted), guessed)

    def commit(self, step: Step, tokens: dict[Sequence, int]) -> None:
        """Apply the results of a step: append tokens, and register full blocks in the prefix cache.

        Sequences aborted during the step are skipped. The caller ends finished answers with `finish`.
        """
        self.counters.guessed += sum(map(len, step.guessed.values()))
        for chunk in step.chunks:
            first = chunk.sequence
            if first.is_guessed:
                continue
            self._count(chunk)
            if first.state is State.RUNNING:
                first.num_computed = chunk.start + chunk.count
                self._seal(first)
            for sequence in chunk.samples:
                if sequence is not first and sequence.state is State.WAITING:
                    sequence.num_cached, sequence.num_counted = first.num_cached, first.num_prompt
                    self.counters.cached_prompt_tokens += first.num_prompt
                    self._fork(first, sequence)
                if sequence.state is not State.FINISHED and sequence in tokens:
                    sequence.token_ids.append(tokens[sequence])

    def accept(self, sequence: Sequence, guessed: Sequence, token: int) -> bool:
        """Append the token after a draft token, after `commit`, if the draft token equals the sampled one.

        Args:
            guessed: its state after the draft token, the next in the step's `guessed`.

        Returns:
            Whether it was appended; if not, later draft tokens are rejected as well.
        """
        size = len(guessed.token_ids)
        if sequence.state is not State.RUNNING or len(sequence.token_ids) != size:
            return False
        if sequence.token_ids[-1] != guessed.token_ids[-1]:
            return False
        self.counters.accepted += 1
        sequence.num_computed = size
        self._seal(sequence)
        sequence.token_ids.append(token)
        return True

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values, as after a change of weights: running sequences are recomputed."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)
        self.pool.forget_all()

    def _guessed(self, chunks: list[Chunk], budget: int) -> dict[Sequence, tuple[Sequence, ...]]:
        """Draft tokens for decoding sequences, from the remaining budget and blocks; no sequence is preempted for
        them."""
        found = {}
        for chunk in chunks if self.num_guesses else ():
            sequence = chunk.sequence
            left = sequence.request.max_tokens - len(sequence.new_ids) - 1
            most = min(self.num_guesses, budget, left)
            if chunk.count > 1 or not chunk.samples or not sequence.new_ids or most < 1:
                continue
            ids = self.guess(sequence, most)
            while ids and not self._has_room(sequence, 1 + len(ids)):
                ids.pop()
            if ids:
                self._take_blocks(sequence, 1 + len(ids))
                found[sequence] = ahead(sequence, ids)
                budget -= len(ids)
        return found

    def _count(self, chunk: Chunk) -> None:
        """Count the tokens of a prompt, each once: found by its first chunk, or computed, but not computed again."""
        sequence, counters = chunk.sequence, self.counters
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_counted = chunk.start
            counters.cached_prompt_tokens += chunk.start
            counters.requests[sequence.request.root] += 1
            if self._looks_up(sequence):
                counters.prefix_queries += sequence.num_prompt
                counters.prefix_hits += chunk.start
        stop = min(chunk.start + chunk.count, sequence.num_prompt)
        counters.prompt_tokens += max(stop - sequence.num_counted, 0)
        sequence.num_counted = max(stop, sequence.num_counted)

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = sequence.num_computed
        samples: tuple[Sequence, ...] = ()
        if start + count == len(sequence.token_ids):
            others = [s for s in sequence.request.sequences if self._waits_for(s, sequence)]
            samples = (sequence, *others)
        return Chunk(sequence, start, count, samples)

    def _waits_for(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether an answer has not started and another sequence computes its prompt."""
        is_new = sequence.state is State.WAITING and not sequence.new_ids
        return is_new and sequence is not first and not first.new_ids

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may be admitted: not while an earlier answer of its request computes the
        prompt."""
        before = sequence.request.sequences[: sequence.index]
        return bool(sequence.new_ids) or all(s.state is State.FINISHED or s.new_ids for s in before)

    def _admitted(self, budget: int) -> Iterator[Sequence]:
        """Admit waiting sequences in order, with their cached prefix, while budget, slots and blocks last."""
        self.waiting.sort(key=lambda sequence: sequence.order)
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) == self.max_sequences:
                return
            if not self._is_ready(sequence):
                continue
            self._take_prefix(sequence)
            count = min(budget, len(sequence.token_ids) - sequence.num_computed)
            if not self._has_room(sequence, count):
                self.pool.release_all(sequence.blocks)
                sequence.begin_anew()
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.running.sort(key=lambda one: one.order)
            sequence.state = State.RUNNING
            budget -= count
            yield sequence

    def _looks_up(self, sequence: Sequence) -> bool:
        """Whether a sequence may take a cached prefix: not if something is wanted of every token of the prompt."""
        params = sequence.request.params
        wants_all = params.prompt_logprobs is not None or params.return_routed_experts
        return self.reuses_prefixes and not wants_all

    def _take_prefix(self, sequence: Sequence) -> None:
        """Share the blocks of the longest cached prefix; at least one token is left to compute, for its logits."""
        ids = sequence.token_ids
        if not self._looks_up(sequence):
            return
        blocks = self.pool.match(ids, most=len(ids) - 1, root=sequence.request.root)
        for block in blocks:
            self.pool.share(block)
        sequence.blocks = blocks
        sequence.num_computed = len(blocks) * self.pool.block_size
        if blocks:
            number = self.pool.number(blocks[-1])
            assert number is not None
            sequence.prefix = number, len(blocks)

    def _wants_copy(self, sequence: Sequence) -> bool:
        """Whether the block of the next token is shared, so that it must be copied before writing."""
        place = sequence.num_computed // self.pool.block_size
        return place < len(sequence.blocks) and self.pool.references[sequence.blocks[place]] > 1

    def _has_room(self, sequence: Sequence, count: int) -> bool:
        more = max(self.blocks_for(sequence.num_computed + count) - len(sequence.blocks), 0)
        return more + self._wants_copy(sequence) <= self.pool.num_available

    def _take_blocks(self, sequence: Sequence, count: int) -> list[tuple[int, int]]:
        """Allocate blocks for the next tokens; returns (from, to) of a block to copy."""
        blocks, copies = sequence.blocks, []
        if self._wants_copy(sequence):
            place = sequence.num_computed // self.pool.block_size
            own = self.pool.take()
            copies.append((blocks[place], own))
            self.pool.release(blocks[place])
            blocks[place] = own
        while len(blocks) < self.blocks_for(sequence.num_computed + count):
            blocks.append(self.pool.take(after=blocks[-1] if blocks else None))
        return copies

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release_all(sequence.blocks)
        sequence.begin_anew()
        sequence.state = State.WAITING
        self.waiting.append(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Register full blocks in the prefix cache."""
        size = self.pool.block_size
        number, sealed = sequence.prefix
        while (sealed + 1) * size <= sequence.num_computed:
            ids = sequence.token_ids[sealed * size : (sealed + 1) * size]
            number = self.pool.seal(sequence.blocks[sealed], number, ids)
            sealed += 1
        sequence.prefix = number, sealed

    def _fork(self, first: Sequence, sequence: Sequence) -> None:
        """Start another answer from the same prompt; both share its blocks until one writes."""
        if first.state is not State.RUNNING or len(self.running) == self.max_sequences:
            return  # admitted later, with the prompt's full blocks from the prefix cache
        for block in first.blocks:
            self.pool.share(block)
        sequence.blocks = list(first.blocks)
        sequence.num_computed, sequence.prefix = first.num_computed, first.prefix
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda one: one.order)
        sequence.state = State.RUNNING
