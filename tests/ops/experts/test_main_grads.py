"""Weight gradients that are added to FP32 buffers over micro-batches."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.experts_case import ExpertsCase

from expertmesh import MoELayer
from expertmesh.errors import ConfigError
from expertmesh.functional import WeightGradients, moe_mlp

NAMES = ("w_in", "w_out", "b_in", "b_out")
PLACES = (1, 2, 4, 5)


def micro_batches(count, shape, **options):
    """Cases that share the weights of the first one."""
    cases = [ExpertsCase.draw(shape, **options) for _ in range(count)]
    return cases, cases[0].leaves()


def buffers_for(leaves):
    wide = [None if leaves[i] is None else torch.zeros_like(leaves[i]) for i in PLACES]
    return WeightGradients(
        *(None if w is None else w.detach().to(torch.promote_types(w.dtype, torch.float32)) for w in wide)
    )


def step(case, leaves, buffers, **options):
    _, w_in, w_out, _, b_in, b_out = leaves
    x, _, _, weights, *_ = case.leaves()
    y = moe_mlp(
        x,
        w_in,
        w_out,
        weights,
        case.metadata,
        activation=case.activation,
        b_in_EGF=b_in,
        b_out_ED=b_out,
        main_grads=buffers,
        **options,
    )
    y.backward(case.grad_TD)
    return x.grad, weights.grad


def summed(cases, leaves, dtype, into):
    """Sums over the micro-batches of the reference's gradients, computed in `dtype`, added up in `into`."""
    totals = [torch.zeros_like(leaves[i], dtype=into) for i in PLACES if leaves[i] is not None]
    for case in cases:
        own = case.leaves(dtype)
        w_in, w_out, b_in, b_out = (
            None if leaves[i] is None else leaves[i].detach().to(dtype).requires_grad_() for i in PLACES
        )
        y = moe_mlp(
            own[0], w_in, w_out, own[3].detach().to(torch.promote_types(dtype, torch.float32)), case.metadata,
            activation=case.activation, b_in_EGF=b_in, b_out_ED=b_out, backend="reference",
        )  # fmt: skip
        present = [w for w in (w_in, w_out, b_in, b_out) if w is not None]
        for total, grad in zip(totals, torch.autograd.grad(y, present, case.grad_TD.to(dtype)), strict=True):
            total += grad.to(into)
    return totals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_sum_over_micro_batches(dtype, bias):
    cases, leaves = micro_batches(5, (60, 16, 24, 4, 2), kind="sparse", dtype=dtype, bias=bias)
    buffers = buffers_for(leaves)
    for case in cases:
        step(case, leaves, buffers)
    plain = summed(cases, leaves, dtype, torch.float32)
    oracle = summed(cases, leaves, torch.float64, torch.float64)
    found = [g for g in (getattr(buffers, name) for name in NAMES) if g is not None]
    for ours, theirs, exact in zip(found, plain, oracle, strict=True):
        assert ours.dtype == torch.float32
        assert_two_times(ours, theirs, exact, what="main gradient", dtype=dtype)
    assert all(leaves[i] is None or leaves[i].grad is None for i in PLACES)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_other_gradients_are_the_same_and_the_first_sum_is_the_gradient(backend):
    case = ExpertsCase.draw((9, 8, 16, 3, 2), bias=True, kind="sparse")
    expected, leaves = case.run(backend), case.leaves()
    buffers = buffers_for(leaves)
    d_x, d_weights = step(case, leaves, buffers, backend=backend)
    assert torch.equal(d_x, expected["x"])
    assert torch.equal(d_weights, expected["weights"])
    oracle, plain = case.run("reference", torch.float64), case.run("reference")
    for name in NAMES:
        assert_two_times(getattr(buffers, name), plain[name], oracle[name], what=name)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nothing_is_rounded_to_bf16_between_micro_batches(backend):
    """A small gradient after a large one vanishes in a BF16 sum, and does not here."""
    shape = (9, 8, 16, 1, 1)
    case = ExpertsCase.draw(shape, dtype=torch.bfloat16)
    leaves = case.leaves()
    buffers = buffers_for(leaves)
    large = 4096.0
    for name in ("w_in", "w_out"):
        getattr(buffers, name).fill_(large)
    step(case, leaves, buffers, backend=backend)
    for name in ("w_in", "w_out"):
        buffer = getattr(buffers, name)
        rounded = buffer.to(torch.bfloat16).float()
        assert (rounded == large).any()
        assert (buffer != rounded).any()


@pytest.mark.parametrize("sizes", [[8, 16], [24]], ids=str)
def test_slices(sizes):
    case = ExpertsCase.draw((30, 16, 24, 3, 2), bias=True)
    x, w_in, w_out, weights, b_in, b_out = case.leaves()
    cut = [[s.detach().requires_grad_() for s in t.split(sizes, 2)] for t in (w_in, w_out, b_in)]
    main = [tuple(torch.zeros(s.shape) for s in slices) for slices in cut]
    buffers = WeightGradients(*main, torch.zeros_like(b_out).detach())
    y = moe_mlp(
        x, cut[0], cut[1], weights, case.metadata,
        activation="swiglu", b_in_EGF=cut[2], b_out_ED=b_out, main_grads=buffers,
    )  # fmt: skip
    y.backward(case.grad_TD)
    oracle, plain = case.run("reference", torch.float64), case.run("reference")
    for name, slices in zip(("w_in", "w_out", "b_in"), main, strict=True):
        assert_two_times(torch.cat(slices, 2), plain[name], oracle[name], what=name)
    assert all(s.grad is None for slices in cut for s in slices)


def test_frozen_weights_leave_their_buffers_alone():
    case = ExpertsCase.draw((30, 16, 24, 3, 2))
    leaves = case.leaves()
    leaves[1].requires_grad_(False)
    buffers = buffers_for(leaves)
    step(case, leaves, buffers)
    assert not buffers.w_in.any()
    assert buffers.w_out.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compile_fullgraph(dtype):
    cases, leaves = micro_batches(2, (24, 8, 16, 3, 2), dtype=dtype, bias=True)
    _, w_in, w_out, _, b_in, b_out = leaves

    def block(x, weights, metadata, buffers):
        return moe_mlp(
            x, w_in, w_out, weights, metadata,
            activation="swiglu", b_in_EGF=b_in, b_out_ED=b_out, main_grads=buffers,
        )  # fmt: skip

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    ours, theirs = buffers_for(leaves), buffers_for(leaves)
    for case in cases:
        step(case, leaves, theirs)
        x, _, _, weights, *_ = case.leaves()
        compiled(x, weights, case.metadata, ours).backward(case.grad_TD)
    for name in NAMES:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert all(leaves[i].grad is None for i in PLACES)


def test_autocast_adds_to_the_buffers_of_fp32_parameters():
    case = ExpertsCase.draw((24, 8, 16, 3, 2))
    leaves = case.leaves()
    buffers = buffers_for(leaves)
    x, w_in, w_out, weights, *_ = leaves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe_mlp(x, w_in, w_out, weights, case.metadata, activation="swiglu", main_grads=buffers)
    y.backward(case.grad_TD.to(y.dtype))
    assert w_in.grad is None
    assert buffers.w_in.any()


class Shard(torch.Tensor):
    """Of a tensor, as DTensor is: what `zeros_like` makes of parameters that FSDP has sharded."""


def test_mistakes_are_one_line_errors():
    case = ExpertsCase.draw((24, 8, 16, 3, 2), bias=True)
    leaves = case.leaves()
    good = buffers_for(leaves)
    transposed = torch.zeros(3, 16, 8).transpose(1, 2)
    for change, word in (
        ({"w_in": None}, "main_grads.w_in"),
        ({"b_out": None}, "main_grads.b_out"),
        ({"w_in": good.w_in.bfloat16()}, "dtype"),
        ({"w_out": good.w_out[:2]}, "shape"),
        ({"w_out": transposed}, "strides"),
        ({"w_out": good.w_out.as_subclass(Shard)}, "a Shard and w_out a Tensor; both"),
    ):
        with pytest.raises(ConfigError, match=word) as error:
            step(case, leaves, WeightGradients(**(vars(good) | change)))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer(dtype):
    """Two micro-batches through a layer: its experts' sums in FP32, all other gradients as ever."""
    make = {"dim": 8, "hidden_dim": 16, "num_experts": 3, "top_k": 2, "seed": 0, "dtype": dtype}
    plain, layer = MoELayer(**make, bias=True), MoELayer(**make, bias=True)
    oracle = MoELayer(**make, bias=True).double()
    layer.experts.accumulate_main_grads()
    for batch in range(2):
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(batch)).to(dtype)
        for model in (plain, layer, oracle):
            y, _ = model(x.to(model.experts.w_in.dtype))
            y.float().sum().backward()
    assert torch.equal(layer.router.proj.weight.grad, plain.router.proj.weight.grad)
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is None
        buffer = getattr(layer.experts.main_grads, name)
        same, exact = plain.experts.get_parameter(name), oracle.experts.get_parameter(name)
        assert_two_times(buffer, same.grad.float(), exact.grad, what=name, dtype=dtype)
    layer.experts.zero_main_grads()
    assert not any(getattr(layer.experts.main_grads, name).any() for name in NAMES)
    layer.experts.accumulate_main_grads(False)
    layer(x)[0].sum().backward()
    assert layer.experts.w_in.grad is not None
    assert "main_grads" not in " ".join(layer.state_dict())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_interleaved_weights(backend):
    """Gate and up alternating in memory, with buffers that lie alike."""
    case = ExpertsCase.draw((9, 8, 16, 3, 2), bias=False, interleaved=True)
    leaves = case.leaves()
    buffers = buffers_for(leaves)
    assert not buffers.w_in.is_contiguous()
    step(case, leaves, buffers, backend=backend)
    oracle, plain = case.run("reference", torch.float64), case.run("reference")
    assert_two_times(buffers.w_in, plain["w_in"], oracle["w_in"], what="w_in")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_opcheck_of_the_operator_that_adds(backend):
    case = ExpertsCase.draw((6, 8, 16, 3, 2), bias=True)
    maps = list(vars(case.metadata).values())
    weights = [case.w_in_EGFD, case.w_out_EDF, case.b_in_EGF, case.b_out_ED]
    call = (
        case.x_TD,
        case.weights_TK,
        *([w] for w in weights),
        [],
        maps,
        "swiglu",
        "dense",
        backend,
        False,
    )
    hidden, main = [case.x_TD.new_empty(0, 32)], [torch.zeros_like(w) for w in weights]
    args = (*call, case.grad_TD, hidden, [True] * 6, main)
    torch.library.opcheck(torch.ops.expertmesh.moe_mlp_backward_into.default, args)


def test_layer_compiled():
    make = {"dim": 8, "hidden_dim": 16, "num_experts": 3, "top_k": 2, "seed": 0}
    layers = [MoELayer(**make, bias=True) for _ in range(2)]
    runs = [layers[0], torch.compile(layers[1], fullgraph=True, backend="aot_eager")]
    for layer, run in zip(layers, runs, strict=True):
        layer.experts.accumulate_main_grads()
        for batch in range(2):
            x = torch.randn(20, 8, generator=torch.Generator().manual_seed(batch))
            run(x)[0].square().sum().backward()
    for name in NAMES:
        eager, compiled = (getattr(layer.experts.main_grads, name) for layer in layers)
        assert eager.any()
        assert torch.equal(eager, compiled), name
    assert all(p.grad is None for layer in layers for p in layer.experts.parameters())
