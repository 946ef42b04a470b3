"""Attention over short sequences as batched products against PyTorch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import Sums, assert_two_times

from expertmesh.ops.attention import dense
from expertmesh.ops.attention import query_blocks as in_blocks
from expertmesh.ops.attention.visible import Visible


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal(q, k, v):
    return in_blocks.attention(q, k, v, Visible(q.shape[2]))


def results(function, tensors, grad):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(grad.to(y.dtype))
    return dict(zip(("y", "dq", "dk", "dv"), [y.detach(), *(t.grad for t in leaves)], strict=True))


def sums_of(q, k, v, grad):
    """What each result sums, in absolute values; a probability's own error is at most twice that of its row's
    scores."""
    B, H, S, d = q.shape
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / d**0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    q, k, v, grad = (t.abs() for t in (q, k, v, grad))
    p = scores.softmax(-1) * (1 + 2 * (q @ k.mT / d**0.5).amax(-1, keepdim=True))
    terms = p * (grad @ v.mT)
    d_scores = (terms + p * terms.sum(-1, keepdim=True)) / d**0.5
    sizes = {"y": p @ v, "dq": d_scores @ k, "dk": d_scores.mT @ q, "dv": p.mT @ grad}
    return {name: Sums(size.numpy(), 2 * d + 2 * S + 8) for name, size in sizes.items()}


@pytest.mark.parametrize("blocks", ["one", "many"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 128, 32), (3, 3, 1, 7, 6), (1, 2, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_the_fused_attention(shape, dtype, blocks, threshold):
    if blocks == "many":
        threshold(in_blocks, "BLOCK_SCORES", 1)
    B, H, G, S, d = shape
    tensors = [torch.randn(B, n, S, d).to(dtype) for n in (H, G, G)]
    grad = torch.randn(B, H, S, d).to(dtype)
    oracle = results(fused, [t.double() for t in tensors], grad.double())
    ours, plain = (results(f, tensors, grad) for f in (causal, fused))
    # few numbers, of which one order of summation may be lucky
    is_tiny = shape[1] == shape[2] and dtype == torch.float32
    sums = sums_of(*(t.double() for t in (*tensors, grad))) if is_tiny else {}
    for name in oracle:
        assert_two_times(ours[name], plain[name], oracle[name], what=name, sums=sums.get(name))


def test_autocast_rounds_no_scores():
    tensors = [torch.randn(2, n, 16, 8).bfloat16() for n in (4, 2, 2)]
    grad = torch.randn(2, 4, 16, 8)
    expected = results(causal, tensors, grad)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(causal, tensors, grad)
    for name in expected:
        assert torch.equal(found[name], expected[name])


def test_takes_any_strides():
    tensors = [torch.randn(2, 5, n, 4).transpose(1, 2) for n in (4, 2, 2)]
    grad = torch.randn(2, 5, 4, 4).transpose(1, 2)
    contiguous = [t.contiguous() for t in tensors]
    ours = results(causal, tensors, grad)
    expected = results(causal, contiguous, grad.contiguous())
    for name in expected:
        assert torch.equal(ours[name], expected[name])


@pytest.mark.parametrize(
    ("S", "keys", "dtype", "expected"),
    [
        (64, 64, torch.bfloat16, True),
        (64, 64, torch.float32, False),
        (64, 96, torch.bfloat16, False),
        (1, 1, torch.bfloat16, False),
        (512, 512, torch.bfloat16, False),
    ],
)
def test_serves_short_sequences_without_earlier_keys(S, keys, dtype, expected):
    q, k = torch.empty(1, 2, S, 8, dtype=dtype), torch.empty(1, 2, keys, 8, dtype=dtype)
    assert dense.is_faster_in_blocks(q, k, Visible(S)) is expected
