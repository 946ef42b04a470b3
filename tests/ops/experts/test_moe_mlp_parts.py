"""Forward, data gradients and weight gradients called apart: to the bit those of the autograd operator."""

import pytest
import torch
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.functional import (
    WeightGradients,
    moe_mlp,
    moe_mlp_data_grads,
    moe_mlp_forward,
    moe_mlp_weight_grads,
)


def apart(case, backend, *, save_h=True, sizes=None, main_grads=None):
    """All results by name, from the three functions."""
    sliced = [case.w_in_EGFD, case.w_out_EDF, case.b_in_EGF]
    if sizes is not None:
        sliced = [None if t is None else list(t.split(sizes, 2)) for t in sliced]
    w_in, w_out, b_in = sliced
    shared = (w_in, w_out, case.weights_TK, case.metadata)
    options = {
        "activation": case.activation,
        "b_in_EGF": b_in,
        "b_out_ED": case.b_out_ED,
        "backend": backend,
    }
    with poisoned_empty():
        y, h = moe_mlp_forward(case.x_TD, *shared, save_h=save_h, **options)
        assert [len(rows) > 0 for rows in h] == [save_h] * len(sizes or [1])
        d_x, d_weights, hidden = moe_mlp_data_grads(case.grad_TD, case.x_TD, h, *shared, **options)
        grads = moe_mlp_weight_grads(
            case.grad_TD, case.x_TD, hidden, *shared, main_grads=main_grads, **options
        )
    found = {"y": y, "x": d_x, "w_in": grads.w_in, "w_out": grads.w_out, "weights": d_weights}
    if case.b_in_EGF is not None:
        found |= {"b_in": grads.b_in, "b_out": grads.b_out}
    return found


@pytest.mark.parametrize("kind", ["uniform", "sparse", "hot", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_torch(kind, dtype, bias):
    """Blocks of more than 64 rows are padded for the products in BF16: padding must not differ either."""
    case = ExpertsCase.draw((150, 16, 24, 3, 2), kind=kind, dtype=dtype, bias=bias)
    together = case.run("torch")
    for save_h in (True, False):
        found = apart(case, "torch", save_h=save_h)
        assert found.keys() == together.keys()
        for name, value in found.items():
            assert torch.equal(value, together[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton(dtype):
    case = ExpertsCase.draw((9, 8, 16, 3, 2), kind="sparse", dtype=dtype, bias=True)
    together = case.run("triton")
    for name, value in apart(case, "triton").items():
        assert torch.equal(value, together[name]), name


def test_slices_give_tuples():
    case = ExpertsCase.draw((30, 16, 24, 3, 2), bias=True)
    leaves = case.leaves()
    parts = [[s.detach().requires_grad_() for s in leaves[i].split([8, 16], 2)] for i in (1, 2, 4)]
    y = moe_mlp(
        leaves[0], parts[0], parts[1], leaves[3], case.metadata,
        activation="swiglu", b_in_EGF=parts[2], b_out_ED=leaves[5],
    )  # fmt: skip
    y.backward(case.grad_TD)
    found = apart(case, "torch", sizes=[8, 16])
    for name, slices in zip(("w_in", "w_out", "b_in"), parts, strict=True):
        assert isinstance(found[name], tuple)
        assert all(torch.equal(a, b.grad) for a, b in zip(found[name], slices, strict=True))
    for name, index in (("x", 0), ("weights", 3), ("b_out", 5)):
        assert torch.equal(found[name], leaves[index].grad)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_into_buffers(backend):
    case = ExpertsCase.draw((9, 8, 16, 3, 2), kind="sparse", bias=True, dtype=torch.bfloat16)
    plain = apart(case, backend)
    names = ("w_in", "w_out", "b_in", "b_out")
    buffers = WeightGradients(*(torch.ones_like(plain[n], dtype=torch.float32) for n in names))
    found = apart(case, backend, main_grads=buffers)
    for name in names:
        assert found[name] is getattr(buffers, name)
        # FP32 sums that are rounded once give the BF16 gradient
        assert torch.equal((found[name] - 1).sign(), plain[name].float().sign())


def test_no_graph_is_recorded_and_the_reference_has_no_parts():
    case = ExpertsCase.draw((9, 8, 16, 3, 2))
    x, w_in, w_out, weights, *_ = case.leaves()
    y, _ = moe_mlp_forward(x, w_in, w_out, weights, case.metadata, activation="swiglu")
    assert not y.requires_grad
    with pytest.raises(ConfigError, match="reference"):
        apart(case, "reference")
