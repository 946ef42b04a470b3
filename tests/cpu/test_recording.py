"""Recordings of functions of CPU tensors: a replay with other values is the function, and what a replay cannot know is
refused."""

import pytest
import torch

from expertmesh.cpu.recording import Recording, UnrecordableError
from expertmesh.kernels.cpu.library import loaded
from expertmesh.ops.native_rows import rms_norm


def in_place(x):
    zeros = torch.zeros(4, 3)
    zeros.index_copy_(0, torch.tensor([2, 0, 1]), x)
    zeros[3] = x[0] * 2
    return zeros


def by_out(x):
    y = torch.empty_like(x)
    torch.exp(x, out=y)
    return y.t().contiguous(), y.to(torch.bfloat16)


def of_constants(x):
    scale = torch.arange(3, dtype=torch.float32) / 2
    return x * scale + x.new_ones(3) + x.new_zeros(3, 3)


FUNCTIONS = {
    "views": lambda x: (x.view(-1)[1:5] + 1).view(2, 2).t() @ x[:2, :2],
    "in place": in_place,
    "out": by_out,
    "constants": of_constants,
    "choices": lambda x: x.topk(2, -1),
    "several results": lambda x: (
        x.sort(-1),
        x.softmax(-1),
        torch.cat((x, x)),
        x.sum(),
        torch.var_mean(x, -1),
        x[torch.tensor([2, 0])],
    ),
    "no numbers": lambda x: (x[:0] + 1, x + 1),
    "a view of the input": lambda x: x[1:],
    "masks": lambda x: x.masked_fill(x > 0, -1.0).clamp(None, 5).where(x < 1, x),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_replay_with_other_values_is_the_function(function):
    x = torch.randn(3, 3)
    recording = Recording()
    found = recording.record(lambda: function(x))
    for _ in range(2):
        x.copy_(torch.randn(3, 3))
        recording.replay()
        for one, other in zip(leaves(found), leaves(function(x)), strict=True):
            assert torch.equal(one, other)


def leaves(found):
    return torch.utils._pytree.tree_leaves(found)


@pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
def test_kernels_in_c_are_repeated():
    x, weight = torch.randn(5, 8), torch.randn(8)
    recording = Recording()
    with torch.no_grad():
        found = recording.record(lambda: rms_norm(x.t().t() * 2, weight, eps=1e-6) + 1)
        for values in (x, weight):  # a weight that learns is not a constant
            values.copy_(torch.randn_like(values))
            recording.replay()
            assert torch.equal(found, rms_norm(x * 2, weight, eps=1e-6) + 1)


READERS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "index": lambda x: range(x.long()[0, 0]),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("function", READERS.values(), ids=READERS)
def test_what_the_host_reads_is_refused(function):
    with pytest.raises(UnrecordableError, match="the host reads"):
        Recording().record(lambda: function(torch.ones(3, 3)))
