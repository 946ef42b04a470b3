"""`moe_mlp` on weights in slices along F: the result of their concatenation, without concatenating."""

import itertools

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.experts_case import ExpertsCase
from tests.support.memory import saved_bytes
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.functional import moe_mlp

SHAPE = (40, 16, 24, 5, 2)


def cut(tensor, sizes, dim):
    return [s.detach().clone().requires_grad_() for s in tensor.split(sizes, dim)]


@pytest.mark.parametrize("sizes", [[24], [8, 16], [7, 1, 16], [3] * 8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["uniform", "sparse", "dropped"])
def test_two_times_rule(sizes, dtype, kind):
    case = ExpertsCase.draw(SHAPE, kind=kind, dtype=dtype, bias=True)
    with poisoned_empty():
        ours = case.run("auto", sizes=sizes)
    case.check(lambda: ours)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_fp64(activation):
    case = ExpertsCase.draw(SHAPE, activation=activation, dtype=torch.float64, bias=True)
    whole = case.run("reference", torch.float64)
    for backend in ("torch", "reference"):
        for name, value in case.run(backend, torch.float64, sizes=[5, 19]).items():
            assert_close_fp64(value, whole[name], what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton(dtype):
    case = ExpertsCase.draw((9, 8, 24, 3, 2), kind="sparse", dtype=dtype, bias=True)
    case.check(lambda: case.run("triton", sizes=[16, 8]))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    list(itertools.product(("torch", "triton"), (torch.float32, torch.bfloat16))),
)
def test_deterministic_and_recomputation_changes_no_bit(backend, dtype):
    case = ExpertsCase.draw((9, 8, 24, 3, 2), kind="dropped", dtype=dtype, bias=True)
    first = case.run(backend, sizes=[16, 8])
    for options in ({}, {"recompute_h": True}):
        again = case.run(backend, sizes=[16, 8], **options)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("recompute_h", [False, True])
def test_slices_are_saved_as_they_are_and_h_once(recompute_h):
    case = ExpertsCase.draw((64, 16, 24, 4, 2))
    w_in, w_out = cut(case.w_in_EGFD, [8, 16], 2), cut(case.w_out_EDF, [8, 16], 2)
    x, _, _, weights, *_ = case.leaves()
    options = {"activation": "swiglu", "recompute_h": recompute_h}
    found = saved_bytes(
        lambda: moe_mlp(x, w_in, w_out, weights, case.metadata, **options),
        parameters=(*w_in, *w_out),
    )
    elements = 64 * 16 + (0 if recompute_h else 2 * 128 * 24)
    metadata_and_weights = 4 * (5 + 3 * 128) + 4 * 128
    assert found == 4 * elements + metadata_and_weights


def test_some_slices_frozen():
    case = ExpertsCase.draw(SHAPE)
    x, w_in, w_out, weights, *_ = case.leaves()
    ins, outs = cut(w_in, [8, 16], 2), cut(w_out, [8, 16], 2)
    full = case.run("auto", sizes=[8, 16])
    ins[0].requires_grad_(False)
    outs[1].requires_grad_(False)
    y = moe_mlp(x, ins, outs, weights, case.metadata, activation="swiglu")
    y.backward(case.grad_TD)
    assert ins[0].grad is None
    assert outs[1].grad is None
    assert torch.equal(ins[1].grad, full["w_in"][:, :, 8:])
    assert torch.equal(outs[0].grad, full["w_out"][:, :, :8])


@pytest.mark.parametrize(
    ("sizes", "bias", "dtype", "grad"),
    [([16], True, torch.float32, True), ([8, 8], False, torch.bfloat16, False)],
)
def test_opcheck(bias, sizes, dtype, grad):
    case = ExpertsCase.draw((6, 8, 16, 3, 2), bias=bias, dtype=dtype)
    x, w_in, w_out, weights, b_in, b_out = case.leaves()
    lists = [cut(t, sizes, 2) for t in (w_in, w_out, *([b_in] if bias else []))]
    lists += [[b_out]] if bias else [[], []]
    maps = list(vars(case.metadata).values())
    args = [x, weights, *lists, [], maps, "swiglu", "dense", "torch", False, [], grad]
    for tensor in (x, weights, *itertools.chain(*lists)):
        tensor.requires_grad_(grad)
    torch.library.opcheck(torch.ops.expertmesh.moe_mlp.default, args)


def test_mistakes_are_one_line_errors():
    case = ExpertsCase.draw(SHAPE, bias=True)
    x, w_in, w_out, weights, b_in, _ = (t if t is None else t.detach() for t in case.leaves())
    ins, outs = list(w_in.split([8, 16], 2)), list(w_out.split([8, 16], 2))
    for change, word in (
        ({"w_out_EDF": w_out}, "slice both alike"),
        ({"w_out_EDF": outs[:1]}, "slices"),
        ({"w_in_EGFD": [], "w_out_EDF": []}, "no slices"),
        ({"w_out_EDF": outs[::-1]}, r"w_out\[0\]"),
        ({"b_in_EGF": b_in}, "slice both alike"),
        ({"b_in_EGF": [b_in]}, "slices"),
        ({"w_in_EGFD": [ins[0], ins[1].double()]}, r"w_in\[1\]"),
    ):
        arguments = {"w_in_EGFD": ins, "w_out_EDF": outs} | change
        with pytest.raises(ConfigError, match=word) as error:
            moe_mlp(x, weights_TK=weights, metadata=case.metadata, activation="swiglu", **arguments)
        assert "\n" not in str(error.value)
