"""Who computes which tokens in the next step. Numbers only: no tensor, no model, no clock.

First come, first served. Running sequences go on in the order of their arrival, then waiting ones are admitted while budget,
places and blocks last. Where blocks run out the youngest running sequence gives its blocks back and is computed again later:
nothing is lost, and the oldest one always goes on, so that none starves.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from expertmesh.engine.block_pool import BlockPool
from expertmesh.engine.drafts import ahead
from expertmesh.engine.request import FinishReason, Request, Sequence, State
from expertmesh.errors import ConfigError


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step.

    Attributes:
        sequence: whose tokens.
        start: first of them, in the sequence.
        count: so many; its keys and values before them are in blocks already.
        samples: sequences that get a token from the logits of the last one: itself and, behind a prompt, the other answers to
            it; none where the chunk ends inside the known tokens.
    """

    sequence: Sequence
    start: int
    count: int
    samples: tuple[Sequence, ...]


@dataclass(frozen=True)
class Step:
    """All that one step computes.

    Attributes:
        chunks: at most one per sequence, and one for each guessed token.
        copies: (from, to) blocks to copy before anything is written: a shared block that a sequence is about to write.
        preempted: sequences that gave their blocks back.
        guessed: of sequences with guessed tokens, what they are after one, two, ... of them.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()
    guessed: Mapping[Sequence, tuple[Sequence, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass
class Counters:
    """What happened so far, for `Engine.stats` and metrics."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    guessed: int = 0
    accepted: int = 0


@dataclass
class Scheduler:
    """The queue, the running sequences and the blocks that they hold.

    Args:
        pool: the blocks.
        token_budget: most tokens of a step.
        max_sequences: most sequences that hold blocks at once.
        reuses_prefixes: whether blocks of earlier requests are taken up again.
        num_guesses: most guessed tokens of a sequence in a step.
        guess: gives the tokens, at most so many, that may come next in a sequence.
    """

    pool: BlockPool
    token_budget: int
    max_sequences: int
    reuses_prefixes: bool = True
    num_guesses: int = 0
    guess: Callable[[Sequence, int], list[int]] | None = None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    @property
    def pools(self) -> list[BlockPool]:
        """The blocks, as of several groups."""
        return [self.pool]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of a sequence take."""
        return -(-num_tokens // self.pool.block_size)

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            ConfigError: it could never run, even alone.
        """
        tokens = len(request.prompt_ids) + request.max_tokens
        # keys and values of the last token are never needed
        if self.blocks_for(tokens - 1) > self.pool.num_blocks:
            held = self.pool.num_blocks * self.pool.block_size
            raise ConfigError(
                f"a prompt of {len(request.prompt_ids)} tokens and max_tokens={request.max_tokens}: the cache holds {held} tokens; "
                "ask for fewer, or make it larger (num_blocks)"
            )
        self.waiting.extend(request.sequences)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End what has not ended of a request, in whatever state it is, and free all that it holds."""
        for sequence in request.sequences:
            self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks; one that has ended stays as it ended."""
        if sequence.state is State.FINISHED:
            return
        queue = self.running if sequence.state is State.RUNNING else self.waiting
        queue.remove(sequence)
        self.pool.release_all(sequence.blocks)
        sequence.state, sequence.finish_reason = State.FINISHED, reason

    @property
    def has_work(self) -> bool:
        """Whether a sequence has not ended."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """Plan the next step and take its blocks; `commit` says what came of it.

        Returns:
            The step; without chunks only if nothing is left to do.
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
        # tokens with one adapter lie together
        chunks.sort(key=lambda chunk: chunk.sequence.request.root)
        return Step(tuple(chunks), tuple(copies), tuple(preempted), guessed)

    def commit(self, step: Step, tokens: dict[Sequence, int]) -> None:
        """Put a computed step into the books: tokens are appended, full blocks can be found from now on.

        Sequences that were aborted while the step was computed are left alone. Whether an answer has ended is the caller's
        to say, by `finish`.

        Args:
            step: as `schedule` gave it.
            tokens: what was drawn for each of `samples` of its chunks; those that have ended may be left out.
        """
        for chunk in step.chunks:
            first = chunk.sequence
            if first.is_guessed:
                continue
            if first.state is State.RUNNING:
                first.num_computed = chunk.start + chunk.count
                self._seal(first)
            for sequence in chunk.samples:
                if sequence is not first and sequence.state is State.WAITING:
                    self._fork(first, sequence)
                if sequence.state is not State.FINISHED and sequence in tokens:
                    sequence.token_ids.append(tokens[sequence])

    def accept(self, sequence: Sequence, guessed: Sequence, token: int) -> bool:
        """Take the token behind a guess after `commit`, if the guess is what was drawn before it.

        Args:
            sequence: the answer.
            guessed: what it was taken for: the next of the step's.
            token: what was drawn behind the guess.

        Returns:
            Whether it was taken; if not, neither can those behind it be.
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
        """Forget all that was computed, as after a change of weights: running sequences begin anew."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)
        self.pool.forget_all()

    def _guessed(self, chunks: list[Chunk], budget: int) -> dict[Sequence, tuple[Sequence, ...]]:
        """Guesses for those who write, with the budget and blocks that are left; nobody gives way to them."""
        found = {}
        for chunk in chunks if self.guess is not None else ():
            sequence = chunk.sequence
            left = sequence.request.max_tokens - len(sequence.new_ids) - 1
            most = min(self.num_guesses, budget, left)
            if chunk.count > 1 or not chunk.samples or not sequence.new_ids or most < 1:
                continue
            assert self.guess is not None
            ids = self.guess(sequence, most)
            while ids and not self._has_room(sequence, 1 + len(ids)):
                ids.pop()
            if ids:
                self._take_blocks(sequence, 1 + len(ids))
                found[sequence] = ahead(sequence, ids)
                budget -= len(ids)
                self.counters.guessed += len(ids)
        return found

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = sequence.num_computed
        samples: tuple[Sequence, ...] = ()
        if start + count == len(sequence.token_ids):
            others = [s for s in sequence.request.sequences if self._waits_for(s, sequence)]
            samples = (sequence, *others)
        return Chunk(sequence, start, count, samples)

    def _waits_for(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether an answer has yet to begin and this one computes its prompt."""
        is_new = sequence.state is State.WAITING and not sequence.new_ids
        return is_new and sequence is not first and not first.new_ids

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may be admitted: not while another answer is about to compute its prompt."""
        before = sequence.request.sequences[: sequence.index]
        return bool(sequence.new_ids) or all(s.state is State.FINISHED or s.new_ids for s in before)

    def _admitted(self, budget: int) -> Iterator[Sequence]:
        """Waiting sequences in order, each given its prefix, while there are budget, places and blocks."""
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
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.running.sort(key=lambda one: one.order)
            sequence.state = State.RUNNING
            budget -= count
            yield sequence

    def _take_prefix(self, sequence: Sequence) -> None:
        """Share the blocks of the longest known prefix; at least one token is left, so that a logit exists."""
        ids = sequence.token_ids
        params = sequence.request.params
        wants_all = params.prompt_logprobs is not None or params.return_routed_experts
        if not self.reuses_prefixes or wants_all:
            return
        self.counters.prefix_queries += len(ids)
        blocks = self.pool.match(ids, most=len(ids) - 1, root=sequence.request.root)
        for block in blocks:
            self.pool.share(block)
        sequence.blocks = blocks
        sequence.num_computed = len(blocks) * self.pool.block_size
        self.counters.prefix_hits += sequence.num_computed
        if blocks:
            number = self.pool.number(blocks[-1])
            assert number is not None
            sequence.prefix = number, len(blocks)

    def _wants_copy(self, sequence: Sequence) -> bool:
        """Whether the block that the next token goes to has other holders, who must not see it."""
        place = sequence.num_computed // self.pool.block_size
        return place < len(sequence.blocks) and self.pool.references[sequence.blocks[place]] > 1

    def _has_room(self, sequence: Sequence, count: int) -> bool:
        more = max(self.blocks_for(sequence.num_computed + count) - len(sequence.blocks), 0)
        return more + self._wants_copy(sequence) <= self.pool.num_available

    def _take_blocks(self, sequence: Sequence, count: int) -> list[tuple[int, int]]:
        """Blocks for the next tokens; returns the (from, to) of a block that has to be copied."""
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
        """Make the blocks that are full known."""
        size = self.pool.block_size
        number, sealed = sequence.prefix
        while (sealed + 1) * size <= sequence.num_computed:
            ids = sequence.token_ids[sealed * size : (sealed + 1) * size]
            number = self.pool.seal(sequence.blocks[sealed], number, ids)
            sealed += 1
        sequence.prefix = number, sealed

    def _fork(self, first: Sequence, sequence: Sequence) -> None:
        """Another answer goes on from the same prompt, whose blocks both hold until one of them writes."""
        if first.state is not State.RUNNING or len(self.running) == self.max_sequences:
            return  # it is admitted later, and finds the prompt's full blocks
        for block in first.blocks:
            self.pool.share(block)
        sequence.blocks = list(first.blocks)
        sequence.num_computed, sequence.prefix = first.num_computed, first.prefix
        sequence.num_cached = first.num_cached
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda one: one.order)
        sequence.state = State.RUNNING
