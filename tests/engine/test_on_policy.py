"""Logprobs with gradients have the engine's bits, and the ordinary forward's gradients."""

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.oracle.numerics import assert_close_fp64

from expertmesh.engine.engine import Engine
from expertmesh.engine.on_policy import token_logprobs
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_what_the_engine_drew_has_the_same_bits_in_training(router, dtype):
    model = gpt(dtype, moe=router, batch_invariant=True)
    engine = Engine(model, deterministic=True, token_budget=7, num_blocks=20, block_size=4)
    params = SamplingParams(temperature=1.1, seed=2, n=2, max_tokens=7, logprobs=0)
    outputs = engine.generate(PROMPTS, params)
    model.train()
    scores = token_logprobs(model, [[*o.prompt_ids, *o.token_ids] for o in outputs])
    assert all(module.training for module in model.modules())
    for output, found in zip(outputs, scores, strict=True):
        drawn = torch.tensor([one.logprob for one in output.logprobs], dtype=found.dtype)
        assert torch.equal(found[len(output.prompt_ids) - 1 :], drawn)
    sum(found.sum() for found in scores).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_gradients_are_those_of_the_ordinary_forward():
    results = []
    for invariant in (True, False):
        model = gpt(torch.float64, batch_invariant=invariant)
        scores = token_logprobs(model, PROMPTS)
        sum(one.sin().sum() for one in scores).backward()
        results.append([*scores, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for place, (ours, plain) in enumerate(zip(*results, strict=True)):
        assert_close_fp64(ours.detach(), plain.detach(), what=f"result {place}")


def test_wrong_sequences_are_refused():
    model = gpt()
    assert token_logprobs(model, []) == []
    for wrong, line in (([[1, 2], [3]], "two or more"), ([[1] * 65], "max_seq_len=64")):
        with pytest.raises(ConfigError, match=line):
            token_logprobs(model, wrong)
