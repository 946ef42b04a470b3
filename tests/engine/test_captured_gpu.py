"""With a GPU: captured decode steps say what launched ones do, bit by bit in deterministic mode, and take the memory
that is said."""

import pytest
import torch
from tests.engine.test_captured import SAMPLINGS
from tests.engine.test_engine import PROMPTS

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def engines(**options):
    """The same model in an engine that captures, and in one that launches."""
    config = ModelConfig(
        vocab_size=512,
        max_seq_len=1024,
        dim=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        init_std=0.3,
        moe={"num_experts": (8,), "hidden_dim": 96, "top_k": 2},
        **options,
    )
    model = GPT(config, device="cuda", dtype=torch.bfloat16, seed=1).eval()
    return [Engine(model, max_sequences=6, compile=compile) for compile in (None, False)]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_answers_are_those_of_launched_steps(sampling):
    params = [SamplingParams(max_tokens=9 + i, seed=i, **sampling) for i in range(len(PROMPTS))]
    captured, launched = engines(batch_invariant=True)
    assert captured._runner.faster is not None and launched._runner.faster is None
    ours, theirs = (one.generate(PROMPTS, params) for one in (captured, launched))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert [one.logprobs for one in ours] == [one.logprobs for one in theirs]
    assert captured.expert_load() == launched.expert_load()


def test_memory_is_as_planned():
    captured, _ = engines()
    captured.warm_up()
    faster = captured._runner.faster
    assert 0 < faster.num_bytes <= faster.planned_bytes
    assert captured.captured
    captured.generate(PROMPTS, SamplingParams(max_tokens=30))
