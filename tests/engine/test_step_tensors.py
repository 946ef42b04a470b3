"""A step is tensors: what they hold, and a number of operators that does not depend on the number of sequences."""

import numpy as np
import pytest
import torch
from tests.engine.test_engine import VOCAB, gpt
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.step_tensors import BatchChunk, StepBatch, step_tensors
from expertmesh.kernels.cpu.library import loaded


def test_a_step_is_one_buffer():
    chunks = (BatchChunk([7, 8, 9], 3, [5, 2]), BatchChunk([4], 8, [1, 0, 3]))
    made = step_tensors(StepBatch(chunks, (2, 3)), 4, torch.device("cpu"))
    assert made.ids_T.tolist() == [7, 8, 9, 4]
    assert made.positions_T.tolist() == [3, 4, 5, 8]
    assert made.slots_T.tolist() == [23, 8, 9, 12]
    assert made.keys.starts.tolist() == [0, 3, 4]
    assert made.keys.num_keys_B.tolist() == [6, 9]
    assert made.keys.table_BN.tolist() == [[5, 2, 0], [1, 0, 3]]
    assert made.rows_R.tolist() == [2, 3]
    memories = {t.untyped_storage().data_ptr() for t in (made.ids_T, made.slots_T, made.rows_R)}
    assert len(memories) == 1


class Operators(TorchDispatchMode):
    """Counts the operators that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


MODELS = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "window": {"dtype": torch.float32, "sliding_window": 3},
    "exact": {"dtype": torch.float32, "batch_invariant": True},
}


EVERYTHING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "logprobs": 3,
    "return_routed_experts": True,
    "presence_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "min_tokens": 4,
}
PARAMS = {"greedy": {"temperature": 0}, "everything": EVERYTHING}


class _Ruled:
    """Rule that lets half of the tokens through."""

    end_ids = frozenset()

    def allowed(self, ids, *, may_end=True):
        return np.arange(VOCAB) % 2 == len(ids) % 2

    def problem(self, ids):
        return None


def operators_of_decoding(model, batch, params, *, rule=None):
    """Numbers of operators of the steps in which each of `batch` sequences computes one token."""
    engine, found = Engine(model, max_sequences=64, token_budget=512, block_size=4, compile=False), []
    run = engine._runner.run

    def counted(step):
        with Operators() as operators:
            result = run(step)
        if len(step.chunks) == batch and all(one.count == 1 for one in step.chunks):
            found.append(operators.count)
        return result

    engine._runner.run = counted
    for i in range(batch):
        engine.add([i, *range(1, 2 + i % 5)], SamplingParams(max_tokens=4, **params))
    for request in engine._requests.values():
        request.sequences[0].rule = rule
    while engine.has_work:
        engine.step()
    assert len(found) >= 2
    return set(found)


@pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_step_of_decoding_has_as_many_operators_for_any_number_of_sequences(options, params):
    model, rule = gpt(**options), _Ruled() if params is EVERYTHING else None
    one, some, many = (operators_of_decoding(model, n, params, rule=rule) for n in (1, 16, 64))
    assert len(one) == 1
    assert one == some == many
