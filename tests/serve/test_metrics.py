"""What /metrics says of guesses and of paged experts is what the engine counts."""

import re

import pytest

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.serve.metrics import Metrics


@pytest.mark.parametrize("slots", [None, 2])
def test_guesses_and_slots_are_counted(folder, slots):
    engine = Engine(folder, expert_slots=slots, num_draft_tokens=2)
    engine.generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=12))
    text, _ = Metrics(engine, "tiny").text()

    def values(name):
        return [float(one) for one in re.findall(rf"^expertmesh:{name}_total.* (\S+)$", text, re.M)]

    stats, paging = engine.stats(), engine.expert_paging()
    assert values("spec_decode_num_draft_tokens") == [stats.num_draft_tokens]
    assert values("spec_decode_num_accepted_tokens") == [stats.num_accepted_tokens]
    assert stats.num_draft_tokens > 0
    assert bool(paging) == (slots is not None)
    assert values("expert_slot_hits") == [one.hits for one in paging]
    assert values("expert_slot_misses") == [one.misses for one in paging]
    assert values("expert_slot_bytes") == [one.bytes_copied for one in paging]
    assert all(one.misses for one in paging)
