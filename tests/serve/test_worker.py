"""Who has Python's lock when: the event loop writes a step out before the next one begins, and is not waited for for
ever."""

import asyncio
import re
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.support.serving import PATIENCE_S, served

from expertmesh.engine.output import RequestOutput
from expertmesh.engine.request import SamplingParams
from expertmesh.serve.worker import EngineFailedError, EngineWorker, Ticket


class CountingEngine:
    """Gives one more token in each step, and notes how many tokens had been written when a step began."""

    def __init__(self, num_steps, begun):
        self.num_steps, self.begun = num_steps, begun
        self.written, self.seen, self.name = 0, [], None

    has_work = property(lambda self: self.name is not None)

    def add(self, prompt, params, *, request_id, adapter):
        if prompt == [13]:
            raise ValueError("thirteen")
        self.name = request_id

    def abort(self, name):
        self.name = None
        return []

    def check_ranks(self):
        pass

    def update_weights(self, state):
        pass

    def stats(self):
        return SimpleNamespace(num_prompt_tokens=0, num_generated_tokens=len(self.seen))

    def step(self):
        self.seen.append(self.written)
        self.begun(len(self.seen))
        has_ended = len(self.seen) == self.num_steps
        name = self.name
        self.name = None if has_ended else name
        ids = tuple(range(len(self.seen)))
        return [RequestOutput(name, 0, (1,), ids, "", "length" if has_ended else None)]


async def answered(engine, **options):
    """Reads one answer as a stream does."""
    worker = EngineWorker(engine, **options)
    worker.start(asyncio.get_running_loop())
    ticket = Ticket([[1]], [SamplingParams()])
    worker.submit(ticket)
    async for news in ticket.changes():
        engine.written = len(news[0].token_ids)
    worker.close(ticket)
    await asyncio.to_thread(worker.stop)


def test_a_step_begins_when_the_last_one_has_been_written():
    engine = CountingEngine(30, lambda number: None)
    asyncio.run(answered(engine, writing_s=PATIENCE_S))
    assert engine.seen == list(range(30))


def test_steps_have_the_number_of_threads_that_was_measured():
    before, seen = torch.get_num_threads(), []
    engine = CountingEngine(2, lambda number: seen.append(torch.get_num_threads()))
    try:
        asyncio.run(answered(engine, num_threads=before + 2))
    finally:
        torch.set_num_threads(before)  # new threads begin with the number that was set last
    assert seen == [before + 2] * 2


def test_a_loop_that_is_busy_does_not_hold_the_engine_up():
    last, blocked = threading.Event(), threading.Event()

    def begun(number):
        if number == 1:  # the loop does something else, until the last step has begun
            loop.call_soon_threadsafe(lambda: (blocked.set(), last.wait(PATIENCE_S)))
            assert blocked.wait(PATIENCE_S)
        if number == 5:
            last.set()

    async def run():
        nonlocal loop
        loop = asyncio.get_running_loop()
        await answered(engine, writing_s=0.001)

    loop = None
    engine = CountingEngine(5, begun)
    asyncio.run(run())
    assert last.is_set() and engine.written == 5
    assert engine.seen[-1] < 4  # the steps went on beside a loop that wrote nothing


def test_a_mistake_while_a_request_is_taken_up_is_its_answer():
    """Whatever it was: no client waits for ever, and the next request is answered."""

    async def run():
        worker = EngineWorker(CountingEngine(3, lambda number: None))
        worker.start(asyncio.get_running_loop())
        wrong, right = (Ticket([[token]], [SamplingParams()]) for token in (13, 1))
        worker.submit(wrong)
        with pytest.raises(EngineFailedError, match="ValueError: thirteen"):
            await asyncio.wait_for(anext(wrong.changes()), PATIENCE_S)
        worker.submit(right)
        news = await asyncio.wait_for(anext(right.changes()), PATIENCE_S)
        assert news[0].token_ids[0] == 0
        await asyncio.to_thread(worker.stop)

    asyncio.run(run())


def test_what_is_loaded_is_passed_over_by_garbage_collections(folder):
    with served(folder) as server:
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        count = int(re.search(r"pass over: (\d+)", server.said.read_text()).group(1))
    assert count > 100_000  # of torch and the rest; a program that imports nothing has none
