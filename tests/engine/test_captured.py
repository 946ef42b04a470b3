"""Captured decode steps, with a stand-in for a GPU's graphs: replays equal the model, prompts and padding change
nothing."""

import pytest
import torch
from tests.engine.test_engine import PROMPTS, gpt
from tests.support.graphs import RecordedGraphs
from tests.support.operators import Operators

from expertmesh.costs.graph_memory import captured_sizes, captured_widths
from expertmesh.engine import engine as engines
from expertmesh.engine.captured import CapturedSteps
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.step_tensors import BatchChunk, StepBatch
from expertmesh.kernels.cpu.library import loaded

pytestmark = pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")

SAMPLINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 9},
    "scored": {"temperature": 0.8, "logprobs": 2, "return_routed_experts": True},
    "changed": {"temperature": 0.8, "presence_penalty": 1.0, "logit_bias": {3: 2.0}},
}


def captured_engine(monkeypatch, model, **options):
    """An engine whose decode steps are captured, and the graphs."""
    graphs = RecordedGraphs()

    def captured(model, config, *, num_blocks, max_len):
        return CapturedSteps(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_len=max_len,
            most_tokens=min(config.max_sequences, config.token_budget),
            device=model.device,
            graphs=graphs,
        )

    monkeypatch.setattr(engines, "fastest_forward", captured)
    engine = Engine(model, max_sequences=6, block_size=4, **options)
    monkeypatch.undo()
    return engine, graphs


def said(answers):
    return [(one.token_ids, one.logprobs, one.error) for one in answers]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_answers_are_those_of_the_model(monkeypatch, sampling):
    params = [SamplingParams(max_tokens=3 + i, seed=i, **sampling) for i in range(len(PROMPTS))]
    model = gpt(torch.float32, batch_invariant=True)
    plain = Engine(model, max_sequences=6, block_size=4)
    engine, graphs = captured_engine(monkeypatch, model)
    ours, theirs = (one.generate(PROMPTS, params) for one in (engine, plain))
    assert said(ours) == said(theirs)
    assert graphs.made
    for one, other in zip(ours, theirs, strict=True):
        if sampling.get("return_routed_experts"):
            assert torch.equal(one.routed_experts, other.routed_experts)
    assert engine.expert_load() == plain.expert_load()


MODELS = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "window": {"dtype": torch.float32, "sliding_window": 3},
    "exact": {"dtype": torch.float32, "batch_invariant": True},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_replay_is_the_padded_step(monkeypatch, options):
    """Every replay against the model on the same padded step, bit by bit."""
    engine, graphs = captured_engine(monkeypatch, gpt(**options))
    faster, seen = engine._runner.faster, []

    class Checked(CapturedSteps):
        def __call__(self, step, forward):
            found = faster(step, forward)
            if found is not None:
                with Operators():  # as the graph was recorded, by the operators of the dispatcher
                    expected = forward(step)
                seen.append(step.padding.num)
                for ours, theirs in zip(found, expected, strict=True):
                    for one, other in zip(ours, theirs, strict=True):
                        assert torch.equal(one, other)
            return found

    engine._runner.faster = Checked.__new__(Checked)
    engine._runner.faster.padding = faster.padding
    params = [SamplingParams(max_tokens=3 + 2 * i, seed=i) for i in range(len(PROMPTS))]
    engine.generate(PROMPTS, params)
    assert set(seen) == {1, 2, 4, 6}
    assert len(seen) > len(graphs.made)


def test_prompts_and_padding_are_not_captured(monkeypatch):
    engine, graphs = captured_engine(monkeypatch, gpt(torch.float32))
    engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    assert not graphs.made
    before = engine._runner.cache.k.clone()
    engine.step()
    assert [graph.num_replays for graph in graphs.made] == [1]
    changed = (engine._runner.cache.k != before).flatten(2).any(-1)
    written = changed.any(0).nonzero().flatten().tolist()
    assert written == [3, engine._runner.cache.num_blocks * 4]
    assert sum(map(sum, engine.expert_load())) == 4 * 2 * engine.model.config.moe.top_k


def test_every_kind_is_captured_at_once(monkeypatch):
    engine, graphs = captured_engine(monkeypatch, gpt(torch.float32), max_len=64)
    engine.warm_up()
    kinds = len(captured_sizes(6)) * len(captured_widths(16)) * 3
    assert len(graphs.made) == kinds
    assert engine._runner.faster.num_bytes == 1024 * kinds
    assert sum(map(sum, engine.expert_load())) == 0
    engine.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert len(graphs.made) == kinds


ONE = BatchChunk([4], 8, [1, 0, 3])
SHAPES = {
    "one": ((ONE,), (0,), (1, 16)),
    "three": ((ONE,) * 3, (0, 1, 2), (4, 16)),
    "long": ((BatchChunk([4], 64, list(range(17))),), (0,), (1, 32)),
    "a prompt": ((BatchChunk([4, 5], 0, [1]),), (1,), None),
    "a prompt beside": ((ONE, BatchChunk([4, 5], 0, [1])), (0, 2), None),
    "no row": ((ONE, ONE), (1,), None),
    "two answers": ((ONE,), (0, 0), None),
    "too many": ((ONE,) * 7, tuple(range(7)), None),
    "nothing": ((), (), None),
}


@pytest.mark.parametrize(("chunks", "rows", "expected"), SHAPES.values(), ids=SHAPES)
def test_sizes_of_padding(monkeypatch, chunks, rows, expected):
    steps = CapturedSteps(num_blocks=40, block_size=4, max_len=128, most_tokens=6, device="cpu", graphs=None)
    found = steps.padding(StepBatch(chunks, rows))
    assert (found and (found.num, found.width)) == expected
    assert found is None or found.spare_slot == 160
