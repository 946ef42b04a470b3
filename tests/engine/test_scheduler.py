"""The scheduler and its blocks under random schedules, before any model: a toy computes keys as plain tuples."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expertmesh.engine.block_pool import ROOT, BlockPool
from expertmesh.engine.request import Request, SamplingParams, State
from expertmesh.engine.scheduler import Scheduler
from expertmesh.errors import ConfigError

END = 0


def toy_token(ids, seed):
    """What the toy model says after some tokens: a pure function of them and of the answer's seed."""
    return (sum((place + 3) * token for place, token in enumerate(ids)) + 7 * seed) % 5


def toy_answer(request, index):
    """The whole answer, computed anew and alone."""
    ids = list(request.prompt_ids)
    while len(ids) - len(request.prompt_ids) < request.max_tokens:
        ids.append(toy_token(ids, index))
        if ids[-1] == END:
            break
    return ids


def toy_guess(sequence, most):
    """What may come next: right but now and then."""
    ids = list(sequence.token_ids)
    for _ in range(most):
        token = toy_token(ids, sequence.index)
        ids.append((token + (len(ids) % 4 == 3)) % 5)
    return ids[len(sequence.token_ids) :]


def abort(scheduler, request):
    for sequence in request.sequences:
        scheduler.finish(sequence, "abort")


class Machine(RuleBasedStateMachine):
    """Requests come, go and are aborted while steps are computed; every answer must be the one computed alone."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 9),
        most=st.integers(1, 5),
        reuses=st.booleans(),
        guesses=st.integers(0, 3),
    )
    def begin(self, num_blocks, block_size, budget, most, reuses, guesses):
        self.pool = BlockPool(num_blocks, block_size=block_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=budget,
            max_sequences=most,
            reuses_prefixes=reuses,
            num_guesses=guesses,
            guess=toy_guess,
        )
        self.memory, self.requests, self.epoch = {}, [], 0
        self.weights = {}  # of a request: the epoch in which it was last forgotten

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        new=st.integers(1, 6),
        n=st.integers(1, 3),
        scored=st.booleans(),
    )
    def add(self, prompt, new, n, scored):
        params = SamplingParams(n=n, prompt_logprobs=0 if scored else None)
        request = Request(str(len(self.requests)), tuple(prompt), params, len(self.requests), new)
        held = self.pool.num_blocks * self.pool.block_size
        if len(prompt) + new - 1 > held:
            with pytest.raises(ConfigError, match="the cache holds"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        before = [one.finish_reason for one in request.sequences]
        abort(self.scheduler, request)
        assert request.is_finished
        after = [one.finish_reason for one in request.sequences]
        assert after == [reason or "abort" for reason in before]

    @rule()
    def forget(self):
        self.scheduler.forget_prefixes()
        self.memory.clear()
        assert self.pool.num_cached == self.pool.num_used == 0

    @rule(data=st.data())
    def step(self, data):
        step = self.scheduler.schedule()
        assert bool(step.chunks) == self.scheduler.has_work
        assert step.num_tokens <= self.scheduler.token_budget
        size = self.pool.block_size
        for source, target in step.copies:
            for offset in range(size):
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
        written, tokens = Counter(), {}
        for chunk in step.chunks:
            one, ids = chunk.sequence, chunk.sequence.token_ids
            for place in range(chunk.start, chunk.start + chunk.count):
                block = one.blocks[place // size]
                assert self.pool.references[block] == 1, "a block that others see is written"
                written[block, place % size] += 1
                self.memory[block, place % size] = tuple(ids[: place + 1])
            for place in range(chunk.start + chunk.count):
                kept = self.memory[one.blocks[place // size], place % size]
                assert kept == tuple(ids[: place + 1]), "content of another prefix"
            for sample in chunk.samples:
                tokens[sample] = toy_token(sample.token_ids, sample.index)
        assert set(written.values()) <= {1}, "two wrote to one place"
        if self.requests and data.draw(st.booleans(), label="abort while computing"):
            abort(self.scheduler, data.draw(st.sampled_from(self.requests)))
        self.settle(step, tokens)

    def settle(self, step, tokens):
        self.scheduler.commit(step, tokens)
        for sequence in tokens:
            if sequence.state is State.FINISHED or sequence.is_guessed:
                continue
            self.end(sequence)
            for one in step.guessed.get(sequence, ()):
                if not self.scheduler.accept(sequence, one, tokens[one]):
                    break
                self.end(sequence)

    def end(self, sequence):
        if sequence.token_ids[-1] == END:
            self.scheduler.finish(sequence, "stop")
        elif len(sequence.new_ids) == sequence.request.max_tokens:
            self.scheduler.finish(sequence, "length")
        if sequence.state is State.FINISHED:
            assert sequence.token_ids == toy_answer(sequence.request, sequence.index)

    @invariant()
    def blocks_add_up(self):
        if not hasattr(self, "pool"):
            return
        pool, scheduler = self.pool, self.scheduler
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        held = Counter(block for one in scheduler.running for block in one.blocks)
        assert [held[block] for block in range(pool.num_blocks)] == pool.references
        assert len(scheduler.running) <= scheduler.max_sequences
        assert all(not one.blocks and one.num_computed == 0 for one in scheduler.waiting)
        orders = [one.order for one in scheduler.running]
        assert orders == sorted(orders)

    @invariant()
    def known_prefixes_are_what_blocks_hold(self):
        if not hasattr(self, "pool"):
            return
        numbers = {number: prefix for prefix, number in self.pool._prefix_of.values()}
        for block, (prefix, _) in self.pool._prefix_of.items():
            ids, parent = list(prefix.ids), prefix.parent
            while parent in numbers:
                ids = [*numbers[parent].ids, *ids]
                parent = numbers[parent].parent
            if parent == ROOT:
                last = self.memory[block, self.pool.block_size - 1]
                assert last == tuple(ids)

    def teardown(self):
        """Drained: every answer is there, and nothing is held."""
        if not hasattr(self, "pool"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            step = self.scheduler.schedule()
            tokens = {s: toy_token(s.token_ids, s.index) for c in step.chunks for s in c.samples}
            self.settle(step, tokens)
        assert all(request.is_finished for request in self.requests), "a request starves"
        assert self.pool.num_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def run(scheduler):
    """Everything to its end; returns the steps."""
    steps = []
    while scheduler.has_work:
        steps.append(scheduler.schedule())
        tokens = {s: 1 for chunk in steps[-1].chunks for s in chunk.samples}
        scheduler.commit(steps[-1], tokens)
        for sequence in tokens:
            if len(sequence.new_ids) == sequence.request.max_tokens:
                scheduler.finish(sequence, "length")
    return steps


def request(name, prompt, new, **params):
    return Request(name, tuple(prompt), SamplingParams(**params), int(name), new)


def test_long_prompts_are_cut_and_do_not_stop_those_who_write():
    scheduler = Scheduler(BlockPool(64, block_size=4), token_budget=8, max_sequences=4)
    scheduler.add(request("0", [1, 2], 20))
    scheduler.commit(step := scheduler.schedule(), {step.chunks[0].sequence: 5})
    scheduler.add(request("1", range(3, 33), 1))
    steps = [[(c.sequence.order[0], c.start, c.count) for c in s.chunks] for s in run(scheduler)]
    assert steps[:5] == [
        [(0, 2, 1), (1, 0, 7)],
        [(0, 3, 1), (1, 7, 7)],
        [(0, 4, 1), (1, 14, 7)],
        [(0, 5, 1), (1, 21, 7)],
        [(0, 6, 1), (1, 28, 2)],
    ]


def test_a_prefix_is_computed_once_and_leaves_a_token():
    scheduler = Scheduler(BlockPool(16, block_size=2), token_budget=99, max_sequences=4)
    scheduler.add(request("0", range(6), 1))
    run(scheduler)
    scheduler.add(again := request("1", range(6), 1))
    (step,) = run(scheduler)
    assert (step.chunks[0].start, step.chunks[0].count) == (4, 2)
    assert again.sequences[0].num_cached == 4
    scheduler.add(request("2", [*range(4), 9, 9], 1, prompt_logprobs=0))
    (step,) = run(scheduler)
    assert step.chunks[0].start == 0, "a prompt whose logprobs are wanted is computed whole"


def test_answers_share_their_prompt_until_they_write():
    pool = BlockPool(16, block_size=4)
    scheduler = Scheduler(pool, token_budget=99, max_sequences=8)
    scheduler.add(request("0", range(6), 3, n=3))
    first = scheduler.schedule()
    assert [s.index for s in first.chunks[0].samples] == [0, 1, 2]
    scheduler.commit(first, {s: s.index for s in first.chunks[0].samples})
    assert pool.num_used == 2
    second = scheduler.schedule()
    assert len(second.copies) == 2 and pool.num_used == 4, "the last one writes in place"
    assert [(c.start, c.count) for c in second.chunks] == [(6, 1)] * 3


def test_guesses_take_what_is_left_and_nobody_gives_way():
    def drafting(num_blocks, budget):
        scheduler = Scheduler(
            BlockPool(num_blocks, block_size=2),
            token_budget=budget,
            max_sequences=4,
            num_guesses=3,
            guess=lambda _, most: [1] * most,
        )
        scheduler.add(request("0", [1, 2], 9))
        scheduler.add(request("1", [3, 4], 9))
        scheduler.commit(step := scheduler.schedule(), {c.sequence: 1 for c in step.chunks})
        step = scheduler.schedule()
        return [len(step.guessed.get(chunk.sequence, ())) for chunk in step.chunks[:2]]

    assert drafting(64, 64) == [3, 3]
    assert drafting(64, 6) == [3, 1]
    assert drafting(64, 4) == [2, 0]
    assert drafting(6, 64) == [3, 3]
    assert drafting(5, 64) == [3, 1]


def test_the_youngest_gives_way_and_comes_back():
    scheduler = Scheduler(BlockPool(4, block_size=2), token_budget=99, max_sequences=4)
    old, young = request("0", [1, 2], 6), request("1", [3, 4], 6)
    scheduler.add(old)
    scheduler.add(young)
    steps = run(scheduler)
    assert scheduler.counters.preemptions >= 1
    assert {s.order[0] for step in steps for s in step.preempted} == {1}
    assert all(len(r.sequences[0].new_ids) == 6 for r in (old, young))


class Colliding(int):
    """A token id whose hash says nothing."""

    def __hash__(self):
        return 1


def test_a_hash_that_collides_finds_nothing():
    pool = BlockPool(4, block_size=1)
    block = pool.take()
    pool.seal(block, ROOT, (Colliding(5),))
    assert pool.match((Colliding(5),), most=1) == [block]
    assert pool.match((Colliding(6),), most=1) == []


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"n": 0}, "n="),
        ({"n": True}, "n="),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "x" * 10_000}, "stop[0]=xxx"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(wrong, line):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**wrong)
    assert line in str(caught.value) and "\n" not in str(caught.value)
