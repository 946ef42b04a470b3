"""RMSNorm, rotary positions and attention against their formulas."""

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs

from expertmesh.models.attention import Attention, DenseContext, apply_rope, rope_tables
from expertmesh.models.layers import RMSNorm

DIM, HEADS, HEAD_DIM, SEQ = 24, 4, 6, 9


def attention(*, kv_heads: int, qk_norm: bool = False, seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return Attention(
        dim=DIM,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        qk_norm=qk_norm,
        norm_eps=1e-6,
        layer_index=0,
        dtype=torch.float64,
    )


def tables(seq_len: int, *, start: int = 0) -> dict[str, torch.Tensor]:
    positions = torch.arange(start, start + seq_len)
    cos, sin = rope_tables(positions, head_dim=HEAD_DIM, base=100.0, dtype=torch.float64)
    return {"cos": cos, "sin": sin}


def plain_attention(layer: Attention, x_BSD: torch.Tensor) -> torch.Tensor:
    """Attention written out: heads in a loop, every key-value head repeated for its group, softmax by hand."""
    group = layer.num_heads // layer.num_kv_heads
    size = layer.head_dim
    seq_len = x_BSD.shape[1]
    rope = tables(seq_len)
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    outputs = []
    for kv_head, rows in enumerate(layer.qkv.weight.split((group + 2) * size)):
        *queries, key, value = (x_BSD @ rows.t()).split(size, dim=-1)
        assert len(queries) == group, kv_head
        for query in queries:
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = layer.q_norm(query), layer.k_norm(key)
            else:
                q, k = query, key
            q, k = (apply_rope(t[:, None], **rope)[:, 0] for t in (q, k))
            scores = q @ k.transpose(1, 2) / size**0.5
            outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    return torch.cat(outputs, dim=-1) @ layer.out.weight.t()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_grouped_query_attention_equals_repeated_heads(kv_heads: int, qk_norm: bool) -> None:
    layer = attention(kv_heads=kv_heads, qk_norm=qk_norm)
    if qk_norm:
        with torch.no_grad():
            layer.q_norm.weight.uniform_(0.5, 2)
            layer.k_norm.weight.uniform_(0.5, 2)
    x = torch.randn(3, SEQ, DIM, dtype=torch.float64)
    ours = layer(x, **tables(SEQ), context=DenseContext.of(SEQ, device=x.device))
    plain = plain_attention(layer, x)
    assert_close_fp64(ours, plain, what="attention output")
    parameters = list(layer.parameters())
    upstream = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, parameters, upstream),
        torch.autograd.grad(plain, parameters, upstream),
        strict=True,
    ):
        assert_close_fp64(mine, theirs, what="attention gradient")


def test_rope_scores_depend_on_relative_positions_only() -> None:
    q, k = torch.randn(2, 1, HEADS, SEQ, HEAD_DIM, dtype=torch.float64)
    near, far = tables(SEQ), tables(SEQ, start=1000)
    scores = [apply_rope(q, **t) @ apply_rope(k, **t).transpose(-1, -2) for t in (near, far)]
    assert_close_fp64(scores[1], scores[0], what="scores after a shift")
    mixed = apply_rope(q, **near) @ apply_rope(k, **far).transpose(-1, -2)
    assert_differs(mixed, scores[0], what="scores at another distance")


def test_rms_norm_formula_and_dtype() -> None:
    norm = RMSNorm(DIM, eps=0.1, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(5, DIM, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    assert_close_fp64(norm(x), expected, what="RMSNorm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_computes_in_full_precision(dtype: torch.dtype) -> None:
    """Its result is the FP32 result rounded once, even where the square overflows the dtype."""
    norm = RMSNorm(DIM, eps=1e-6, dtype=dtype)
    x = (torch.randn(5, DIM) * 1000).to(dtype)
    exact = RMSNorm(DIM, eps=1e-6)(x.float()).to(dtype)
    assert norm(x).dtype == dtype
    assert torch.equal(norm(x), exact)
