"""Windows, caps, sinks and grouped queries against one query at a time in FP64, in dense and paged attention, both arithmetics."""

import numpy as np
import pytest
import torch
from tests.oracle.numerics import as_fp64, assert_close_fp64, assert_two_times

from expertmesh.engine.kv_cache import PagedCache, PagedContext, span_of
from expertmesh.models.attention import DenseContext
from expertmesh.ops.attention import blockwise
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.attention.visible import visible
from expertmesh.ops.row_arithmetic import BATCH_INVARIANT, ORDINARY

H, h, d = 6, 3, 16
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, -20.0, 1.5], dtype=torch.float64)
RULES = {
    "plain": PLAIN,
    "window": ScoreRule(window=4),
    "window of one": ScoreRule(window=1),
    "wide window": ScoreRule(window=100),
    "cap": ScoreRule(softcap=1.5),
    "sinks": ScoreRule(sinks_H=SINKS),
    "all": ScoreRule(window=5, softcap=2.0, sinks_H=SINKS),
}
ARITHMETICS = {"ordinary": ORDINARY, "invariant": BATCH_INVARIANT}
SIZES = ((1, 1), (1, 70), (9, 9), (5, 11), (70, 70))


def oracle(q, k, v, rule):
    """(S, H, d) attention of the last S of L tokens, one query head after the other."""
    q, k, v = map(as_fp64, (q, k, v))
    (S, heads, size), L = q.shape, len(k)
    y = np.zeros((S, heads, v.shape[2]))
    for i in range(S):
        at = L - S + i
        first = 0 if rule.window is None else max(0, at + 1 - rule.window)
        for head in range(heads):
            of_key = head // (heads // k.shape[1])
            s = k[first : at + 1, of_key] @ q[i, head] * size**-0.5
            if rule.softcap is not None:
                s = rule.softcap * np.tanh(s / rule.softcap)
            sink = [] if rule.sinks_H is None else [float(rule.sinks_H[head])]
            e = np.exp(s - max([*s, *sink]))
            total = e.sum() + sum(np.exp(one - max([*s, one])) for one in sink)
            y[i, head] = e / total @ v[first : at + 1, of_key]
    return y


def draw(S, L, dtype):
    torch.manual_seed(S + L)
    return [
        torch.randn(n, heads, d, dtype=torch.float64).to(dtype)
        for n, heads in ((S, H), (L, h), (L, h))
    ]


def dense(q, k, v, rule, arithmetic):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    seen = visible(q.shape[2], k.shape[2], device=q.device)
    return arithmetic.attention(q, k, v, seen, rule)[0].transpose(0, 1)


class _Config:
    num_layers, cache_heads, cache_size, is_latent = 2, h, d, False


def paged(q, k, v, rule, arithmetic, blocks):
    """The same with earlier keys in blocks, and a neighbour of one token before it."""
    S, L = len(q), len(k)
    cache = PagedCache(_Config(), num_blocks=60, block_size=4, device=q.device, dtype=q.dtype)
    places = cache.places(blocks, 0, L)
    cache.k[1, places], cache.v[1, places] = k, v
    cache.k[1, places[L - S :]] = cache.v[1, places[L - S :]] = 0.0
    spans = (
        span_of([59], first=0, start=0, count=1, cache=cache),
        span_of(blocks, first=1, start=L - S, count=S, cache=cache),
    )
    where = torch.tensor([236, *places[L - S :]])
    context = PagedContext(cache, torch.arange(S + 1), where, spans)
    q, k, v = (torch.cat((t[:1], t[-S:])) for t in (q, k, v))
    y = context.attend(1, q, k, v, arithmetic=arithmetic, rule=rule)
    return y[1:].view(S, H, d)


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_is_that_of_one_query_at_a_time(rule, arithmetic):
    for S, L in SIZES:
        q, k, v = draw(S, L, torch.float64)
        expected = oracle(q, k, v, rule)
        assert_close_fp64(dense(q, k, v, rule, arithmetic), expected, what=f"dense {S} of {L}")
        for blocks in (list(range(3, 3 + -(-L // 4))), list(range(50, 50 - -(-L // 4), -1))):
            found = paged(q, k, v, rule, arithmetic, blocks)
            assert_close_fp64(found, expected, what=f"paged {S} of {L}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rounding_is_no_worse_than_that_of_plain_products(rule, arithmetic, dtype):
    for S, L in SIZES:
        q, k, v = draw(S, L, dtype)
        expected = oracle(q, k, v, rule)
        plain = dense(q, k, v, ScoreRule(rule.window, rule.softcap or 1e9, rule.sinks_H), ORDINARY)
        for found in (
            dense(q, k, v, rule, arithmetic),
            paged(q, k, v, rule, arithmetic, list(range(3, 3 + -(-L // 4)))),
        ):
            assert_two_times(found, plain, expected, what=f"{S} of {L}", dtype=dtype, scale=1.0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_invariant_bits_do_not_follow_what_is_asked_at_once(rule):
    q, k, v = draw(70, 70, torch.float32)
    whole = dense(q, k, v, rule, BATCH_INVARIANT)
    for first, stop in ((0, 1), (3, 9), (60, 70), (69, 70)):
        part = dense(q[first:stop], k[:stop], v[:stop], rule, BATCH_INVARIANT)
        assert torch.equal(part, whole[first:stop])


@pytest.mark.parametrize("rule", [RULES["all"], RULES["sinks"], RULES["window"]])
def test_gradients_of_both_arithmetics_are_those_of_differences(rule):
    q, k, v = (t.requires_grad_() for t in draw(3, 7, torch.float64))
    sinks = None if rule.sinks_H is None else rule.sinks_H.clone().requires_grad_()
    wanted = [t for t in (q, k, v, sinks) if t is not None]
    for arithmetic in ARITHMETICS.values():

        def function(q, k, v, sinks=None, arithmetic=arithmetic):
            return dense(q, k, v, ScoreRule(rule.window, rule.softcap, sinks), arithmetic)

        assert torch.autograd.gradcheck(function, tuple(wanted), fast_mode=True)


def test_a_dense_context_hands_the_rule_on():
    q, k, v = draw(9, 9, torch.float64)
    context = DenseContext.of(9, device=q.device)
    y = context.attend(0, q, k, v, arithmetic=ORDINARY, rule=RULES["all"])
    assert_close_fp64(y.view(9, H, d), oracle(q, k, v, RULES["all"]), what="dense context")


@pytest.mark.parametrize(("S", "L"), [(2, 2), (64, 64), (65, 200), (200, 200), (130, 131)])
def test_blocks_of_queries_are_attention_too(S, L):
    q, k, v = (t.transpose(0, 1)[None] for t in draw(S, L, torch.bfloat16))
    assert blockwise.serves(q, k) and not blockwise.serves(q.requires_grad_(), k)
    q = q.detach()
    found = blockwise.causal_attention(q, k, v)[0].transpose(0, 1)
    mask = torch.ones(S, L, dtype=torch.bool).tril(L - S)
    plain = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    expected = oracle(*(t[0].transpose(0, 1) for t in (q, k, v)), PLAIN)
    assert_two_times(found, plain[0].transpose(0, 1), expected, what=f"{S} of {L}")
