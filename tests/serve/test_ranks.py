"""A server over ranks: one door, one end, and a rank that is killed ends all others with one line each."""

import json
import re
import signal
import time
import urllib.error
import urllib.request

import pytest
from tests.support.agent import Agent, hasty_main
from tests.support.patience import PATIENCE_S

NUM_RANKS = 4
TIMEOUT_S = 20.0
"""Longer than a busy machine lets a rank of a tiny model wait."""


@pytest.fixture
def agent(tmp_path):
    found = Agent(NUM_RANKS, tmp_path)
    yield found
    found.stop()


def begin(agent, folder):
    """Start the server; gives its address when it answers."""
    words = ["serve", str(folder), "--port", "0", "--device", "cpu", "--parallel.tp-degree", "2"]
    agent.start(hasty_main, [*words, "--parallel.timeout-s", str(TIMEOUT_S)])
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := re.search(r"http://127\.0\.0\.1:\d+", agent.printed(0)):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(agent.printed(0))


def asked(address, **changes):
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0} | changes
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_answers_and_ends(agent, folder):
    address = begin(agent, folder)
    first = asked(address)["choices"][0]["text"]
    assert asked(address)["choices"][0]["text"] == first
    for rank in range(NUM_RANKS):  # as torchrun does it
        agent.kill(rank, signal.SIGTERM)
    assert agent.wait(timeout_s=PATIENCE_S) == [0] * NUM_RANKS
    for rank in range(1, NUM_RANKS):
        assert agent.printed(rank) == ""


@pytest.mark.slow
@pytest.mark.parametrize("odd", range(NUM_RANKS))
def test_a_killed_rank_ends_all(agent, folder, odd):
    address = begin(agent, folder)
    asked(address)
    agent.kill(odd)
    if odd:
        with pytest.raises((urllib.error.HTTPError, OSError)):
            for _ in range(1000):  # a step at the latest
                asked(address)
    codes = agent.wait(timeout_s=PATIENCE_S)
    for rank in range(NUM_RANKS):
        said = agent.printed(rank)
        if rank == odd:
            continue
        assert codes[rank] == 1, (codes, said)
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and f"rank {rank}" in lines[0], said
