"""Weight gradients that are computed when somebody asks: to the bit those of the autograd operator."""

import pytest
import torch
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.functional import WeightGradients, moe_mlp
from expertmesh.ops.experts.deferred_wgrad import DeferredWeightGradients

NAMES = ("w_in", "w_out", "b_in", "b_out")


def late(case, backend, *, recompute_h=False, sizes=None, main_grads=None):
    """All results by name; gradients of slices as tuples."""
    x, w_in, w_out, weights, b_in, b_out = case.leaves()
    if sizes is not None:
        w_in, w_out, b_in = (list(t.split(sizes, 2)) for t in (w_in, w_out, b_in))
    left = DeferredWeightGradients()
    assert left.compute() == []
    with poisoned_empty():
        y = moe_mlp(
            x, w_in, w_out, weights, case.metadata, activation=case.activation, b_in_EGF=b_in,
            b_out_ED=b_out, recompute_h=recompute_h, main_grads=main_grads, backend=backend, late=left,
        )  # fmt: skip
        y.backward(case.grad_TD)
        assert sizes is not None or w_in.grad is None
        found = left.compute()
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad}, found


@pytest.mark.parametrize("kind", ["uniform", "sparse", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_torch(kind, dtype, bias):
    """Blocks of more than 64 rows are padded for the products in BF16: padding must not differ either."""
    case = ExpertsCase.draw((150, 16, 24, 3, 2), kind=kind, dtype=dtype, bias=bias)
    together = case.run("torch")
    for recompute_h in (True, False):
        found, grads = late(case, "torch", recompute_h=recompute_h)
        found |= zip(NAMES, grads, strict=False)
        assert found.keys() == together.keys()
        for name, value in found.items():
            assert torch.equal(value, together[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton(dtype):
    case = ExpertsCase.draw((9, 8, 16, 3, 2), kind="sparse", dtype=dtype, bias=True)
    together = case.run("triton")
    found, grads = late(case, "triton")
    for name, value in (found | dict(zip(NAMES, grads, strict=True))).items():
        assert torch.equal(value, together[name]), name


def test_slices():
    case = ExpertsCase.draw((30, 16, 24, 3, 2), bias=True)
    leaves = case.leaves()
    parts = [[s.detach().requires_grad_() for s in leaves[i].split([8, 16], 2)] for i in (1, 2, 4)]
    y = moe_mlp(
        leaves[0], parts[0], parts[1], leaves[3], case.metadata,
        activation="swiglu", b_in_EGF=parts[2], b_out_ED=leaves[5],
    )  # fmt: skip
    y.backward(case.grad_TD)
    found, grads = late(case, "torch", sizes=[8, 16])
    theirs = [leaf.grad for leaf in (*parts[0], *parts[1], *parts[2], leaves[5])]
    assert all(torch.equal(ours, other) for ours, other in zip(grads, theirs, strict=True))
    assert torch.equal(found["x"], leaves[0].grad)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_into_buffers(backend):
    case = ExpertsCase.draw((9, 8, 16, 3, 2), kind="sparse", bias=True, dtype=torch.bfloat16)
    _, plain = late(case, backend)
    buffers = [torch.ones_like(grad, dtype=torch.float32) for grad in plain]
    _, found = late(case, backend, main_grads=WeightGradients(*buffers))
    assert found == [None] * 4
    for buffer, grad in zip(buffers, plain, strict=True):
        # FP32 sums that are rounded once give the BF16 gradient
        assert torch.equal((buffer - 1).sign(), grad.float().sign())
