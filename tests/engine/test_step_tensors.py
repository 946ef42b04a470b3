"""A step is tensors: what they hold, and a number of operators that does not depend on the number of sequences."""

import pytest
import torch
from tests.engine.test_engine import gpt
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


def operators_of_decoding(model, batch):
    """Numbers of operators of the steps in which each of `batch` sequences computes one token."""
    engine, found = Engine(model, max_sequences=64, token_budget=512, block_size=4), []
    compute = engine._runner.compute

    def counted(step):
        with Operators() as operators:
            result = compute(step)
        if len(step.chunks) == batch and all(len(one.ids) == 1 for one in step.chunks):
            found.append(operators.count)
        return result

    engine._runner.compute = counted
    prompts = [[i, *range(1, 2 + i % 5)] for i in range(batch)]
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    assert len(found) >= 2
    return set(found)


@pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_step_of_decoding_has_as_many_operators_for_any_number_of_sequences(options):
    model = gpt(**options)
    with torch.no_grad():
        one, some, many = (operators_of_decoding(model, batch) for batch in (1, 16, 64))
    assert len(one) == 1
    assert one == some == many
