"""RMSNorm and rotary positions in blocks against plain PyTorch, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64, assert_two_times

from expertmesh.models import attention
from expertmesh.ops.cpu import norms

EPS = 1e-5


def plain_norm(x, weight):
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = weight.to(dtype)
    return F.rms_norm(x.to(dtype), wide.shape, wide, EPS).to(x.dtype)


def written_out_norm(x, weight):
    """The formula; rounds elsewhere than F.rms_norm, so that one lucky rounding of a few numbers does not decide."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.to(dtype)).to(x.dtype)


def block_norm(x, weight):
    return norms.rms_norm(x, weight, eps=EPS)


def plain_rope(x, weight, cos, sin):
    x = x.transpose(1, 2)
    return attention.apply_rope(x if weight is None else plain_norm(x, weight), cos, sin).transpose(1, 2)


def block_rope(x, weight, cos, sin):
    return norms.norm_and_rope(x, weight, eps=EPS, cos=cos, sin=sin)


def results(function, x, weight, grad, *tables):
    x = x.clone().requires_grad_()
    weight = None if weight is None else weight.clone().requires_grad_()
    y = function(x, weight, *tables)
    y.backward(grad.to(y.dtype))
    found = {"y": y.detach(), "dx": x.grad}
    return found if weight is None else found | {"dw": weight.grad}


def tables(S, d, dtype):
    return attention.rope_tables(torch.arange(S), head_dim=d, base=100.0, dtype=dtype)


@pytest.fixture(autouse=True)
def _small_blocks(threshold):
    threshold(norms, "_BLOCK_ELEMENTS", 64)


CASES = [(1, 2), (3, 7), (40, 16), (2, 5, 6)]


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_rms_norm_in_fp64(shape):
    x, weight = torch.randn(shape).double(), torch.randn(shape[-1]).double()
    grad = torch.randn(shape).double()
    ours, plain = (results(f, x, weight, grad) for f in (block_norm, plain_norm))
    for name in plain:
        assert_close_fp64(ours[name], plain[name], what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_rms_norm_by_the_two_times_rule(shape, dtype):
    x, weight, grad = torch.randn(shape).to(dtype), torch.randn(shape[-1]), torch.randn(shape)
    oracle = results(plain_norm, x.double(), weight.double(), grad.to(dtype).double())
    ours = results(block_norm, x, weight, grad)
    plain = [results(f, x, weight, grad) for f in (plain_norm, written_out_norm)]
    # dx is the difference of two numbers of this size, which may all but cancel
    inverse_rms = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    summands = {"dx": float((grad.double() * weight.double() * inverse_rms).abs().max())}
    for name in oracle:
        scale = summands.get(name, 0.0)
        references = [p[name] for p in plain]
        assert_two_times(ours[name], references, oracle[name], what=name, scale=scale)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 5, 2, 6), (2, 9, 3, 4)], ids=str)
def test_norm_and_rope_in_fp64(shape, with_norm):
    x, grad = torch.randn(shape).double(), torch.randn(shape).double()
    weight = torch.randn(shape[-1]).double() if with_norm else None
    turn = tables(shape[1], shape[-1], torch.float64)
    ours, plain = (results(f, x, weight, grad, *turn) for f in (block_rope, plain_rope))
    for name in plain:
        assert_close_fp64(ours[name], plain[name], what=name)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rope_by_the_two_times_rule(dtype, with_norm):
    shape = (2, 9, 3, 8)
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(8) if with_norm else None
    wide = None if weight is None else weight.double()
    turn = tables(9, 8, torch.float32)
    turn64 = [t.double() for t in turn]
    oracle = results(plain_rope, x.double(), wide, grad.double(), *turn64)
    ours, plain = (results(f, x, weight, grad, *turn) for f in (block_rope, plain_rope))
    for name in oracle:
        assert_two_times(ours[name], plain[name], oracle[name], what=name)


@pytest.mark.parametrize("mode", [torch.autocast("cpu", torch.bfloat16), torch.device("meta")])
def test_modes_of_the_caller_change_no_bit(mode):
    x, weight, grad = torch.randn(2, 9, 3, 16), torch.randn(16), torch.randn(2, 9, 3, 16)
    for function, turn in ((block_norm, ()), (block_rope, tables(9, 16, torch.float32))):
        expected = results(function, x, weight, grad, *turn)
        with mode:
            found = results(function, x, weight, grad, *turn)
        for name in expected:
            assert torch.equal(found[name], expected[name])


def test_strided_input_is_taken_as_it_is():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)[:, :, 1:, :]
    turn = tables(5, 8, torch.float64)
    assert_close_fp64(block_rope(x, None, *turn), plain_rope(x, None, *turn), what="y")
