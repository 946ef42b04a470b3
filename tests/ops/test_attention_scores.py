"""Windows, caps, sinks and grouped queries against one query at a time in FP64, in dense and paged attention, both
arithmetics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.oracle.numerics import (
    as_fp64,
    assert_close_fp64,
    assert_two_times,
    assert_two_times_rms,
)
from tests.support.memory import peak_bytes

from expertmesh.engine.kv_cache import PagedCache, PagedContext
from expertmesh.kernels.cpu.library import loaded
from expertmesh.models.attention import DenseContext
from expertmesh.ops import native_linear
from expertmesh.ops.attention import paged_native
from expertmesh.ops.attention import query_blocks as in_blocks
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule, as_mask, in_window
from expertmesh.ops.attention.visible import visible
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS

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
ARITHMETICS = {"ordinary": DEFAULT_OPS, "invariant": BATCH_INVARIANT_OPS}
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


def by_products(q, k, v, rule):
    """The same by plain PyTorch, all scores at once, in FP32 from operands of any type; differentiable."""
    (S, heads, size), (L, of_keys, _) = q.shape, k.shape
    q, k, v = (t.double() if t.dtype == torch.float64 else t.float() for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // of_keys, 1) for t in (k, v))
    s = torch.einsum("shd,lhd->hsl", q, k) * size**-0.5
    if rule.softcap is not None:
        s = rule.softcap * torch.tanh(s / rule.softcap)
    place = torch.arange(L) - torch.arange(L - S, L)[:, None]
    hidden = (place > 0) | (place <= -(rule.window or L))
    s = s.masked_fill(hidden, -torch.inf)
    if rule.sinks_H is not None:
        s = torch.cat((s, rule.sinks_H.to(s.dtype)[:, None, None].expand(-1, S, 1)), 2)
    return torch.einsum("hsl,lhd->shd", s.softmax(2)[..., :L], v)


def draw(S, L, dtype):
    torch.manual_seed(S + L)
    return [torch.randn(n, heads, d, dtype=torch.float64).to(dtype) for n, heads in ((S, H), (L, h), (L, h))]


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
    places = [blocks[i // 4] * 4 + i % 4 for i in range(L)]
    cache.k[1, places], cache.v[1, places] = k, v
    cache.k[1, places[L - S :]] = cache.v[1, places[L - S :]] = 0.0
    table = torch.tensor([[59] * len(blocks), blocks])
    keys = PagedKeys(torch.tensor([0, 1, 1 + S]), torch.tensor([1, L]), table)
    slots = torch.tensor([236, *places[L - S :]])
    context = PagedContext(cache, torch.arange(S + 1), slots, keys)
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
        plain = by_products(q, k, v, rule).to(dtype)
        for found in (
            dense(q, k, v, rule, arithmetic),
            paged(q, k, v, rule, arithmetic, list(range(3, 3 + -(-L // 4)))),
        ):
            assert_two_times(found, plain, expected, what=f"{S} of {L}", dtype=dtype, scale=1.0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_invariant_bits_do_not_follow_what_is_asked_at_once(rule):
    q, k, v = draw(70, 70, torch.float32)
    whole = dense(q, k, v, rule, BATCH_INVARIANT_OPS)
    for first, stop in ((0, 1), (3, 9), (60, 70), (69, 70)):
        part = dense(q[first:stop], k[:stop], v[:stop], rule, BATCH_INVARIANT_OPS)
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
    y = context.attend(0, q, k, v, arithmetic=DEFAULT_OPS, rule=RULES["all"])
    assert_close_fp64(y.view(9, H, d), oracle(q, k, v, RULES["all"]), what="dense context")


@pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
@pytest.mark.parametrize(("S", "L"), [(2, 2), (64, 64), (65, 200), (200, 200), (130, 131)])
def test_kernels_compute_sequences_without_pages_too(S, L):
    q, k, v = (t.transpose(0, 1)[None] for t in draw(S, L, torch.bfloat16))
    whole = paged_native.of_sequences(q, k, v)
    if native_linear.is_only_way(q, k, v):
        seen = visible(S, L, device=q.device)
        assert torch.equal(DEFAULT_OPS.attention(q, k, v, seen), whole)
    found = whole[0].transpose(0, 1)
    mask = torch.ones(S, L, dtype=torch.bool).tril(L - S)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    expected = oracle(*(t[0].transpose(0, 1) for t in (q, k, v)), PLAIN)
    assert_two_times(found, plain[0].transpose(0, 1), expected, what=f"{S} of {L}")


LARGE = ScoreRule(window=40, softcap=2.0, sinks_H=SINKS)
CASES = {
    "sinks": (1, 200, 200, RULES["sinks"], None),
    "window": (2, 130, 300, LARGE, None),
    "chunks": (1, 200, 200, ScoreRule(chunk=50, sinks_H=SINKS), None),
    "padding": (3, 100, 100, LARGE, "padding"),
    "documents": (2, 100, 100, RULES["sinks"], "documents"),
}


def called(S, L, rule, kind, B):
    """Operands of a batch, and what they see."""
    torch.manual_seed(S + L)
    q, k, v = (
        torch.randn(B, heads, n, d, dtype=torch.float64, requires_grad=True) for heads, n in ((H, S), (h, L), (h, L))
    )
    sinks = rule.sinks_H.clone().requires_grad_()
    masks = {}
    if kind == "padding":
        masks["is_token_BL"] = torch.arange(L) >= torch.tensor([[0], [7], [70]])
    if kind == "documents":
        masks["document_BS"] = torch.arange(S).expand(B, S) // torch.tensor([[30], [64]])
    return [q, k, v, sinks], visible(S, L, device=q.device, **masks)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("scores", [1, 20_000, 1 << 30])
def test_blocks_give_what_all_scores_at_once_give(case, scores, threshold):
    """In FP64, forward and backward: blocks of some queries of one key head, of more heads, and one for all."""
    B, S, L, rule, kind = case
    threshold(in_blocks, "BLOCK_SCORES", scores)
    operands, seen = called(S, L, rule, kind, B)
    q, k, v, sinks = operands
    mask = as_mask(in_window(seen, rule, num_keys=L, device=q.device), num_keys=L, device=q.device)
    s = q @ k.repeat_interleave(H // h, 1).mT * d**-0.5
    s = s if rule.softcap is None else rule.softcap * torch.tanh(s / rule.softcap)
    s = torch.cat((s.masked_fill(~mask, -torch.inf), sinks[:, None, None].expand(B, H, S, 1)), 3)
    plain = s.softmax(3)[..., :L] @ v.repeat_interleave(H // h, 1)
    grad = torch.randn_like(plain)
    y = in_blocks.attention(q, k, v, seen, replace(rule, sinks_H=sinks))
    assert_close_fp64(y, plain, what="y")
    found, expected = (torch.autograd.grad(one, operands, grad) for one in (y, plain))
    for name, *pair in zip("qkvs", found, expected, strict=True):
        assert_close_fp64(*pair, what=name)
    with torch.no_grad():
        again = in_blocks.attention(q, k, v, seen, replace(rule, sinks_H=sinks))
    assert torch.equal(again, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_blocks_are_as_exact_as_plain_ones(dtype, threshold):
    threshold(in_blocks, "BLOCK_SCORES", 20_000)
    S, L = 100, 150
    draws = []
    for seed in range(32):  # of six sinks each
        torch.manual_seed(seed)
        wide = [torch.randn(n, heads, d) for n, heads in ((S, H), (L, h), (L, h))]
        wide, grad = [t.to(dtype) for t in (*wide, SINKS)], torch.randn(S, H, d).to(dtype)
        sides = []
        for run, this in ((dense, dtype), (by_products, dtype), (by_products, torch.float64)):
            leaves = [t.to(this).requires_grad_() for t in wide]
            rule = replace(LARGE, sinks_H=leaves[3])
            more = [DEFAULT_OPS] if run is dense else []
            y = run(*leaves[:3], rule, *more).to(this)
            sides.append([y.detach(), *torch.autograd.grad(y, leaves, grad.to(this))])
        draws.append(sides)
    for i, what in enumerate(("y", "q", "k", "v", "sinks")):
        ours, plain, exact = ([sides[side][i] for sides in draws] for side in range(3))
        assert_two_times_rms(ours, plain, exact, what=what, dtype=dtype)


def test_memory_is_that_of_a_block_of_scores(threshold):
    """Forward and backward, 2,048 queries and keys: all scores of six heads would be 100 MB in FP32."""
    threshold(in_blocks, "BLOCK_SCORES", 1 << 16)
    S = 2048
    q, k, v = (torch.randn(1, n, S, d, requires_grad=True) for n in (H, h, h))
    seen = visible(S, S, device=q.device)
    rule = ScoreRule(sinks_H=SINKS.float())

    def step():
        in_blocks.attention(q, k, v, seen, rule).sum().backward()

    inputs = sum(t.nbytes for t in (q, k, v))
    block = in_blocks.BLOCK_QUERIES * (H // h) * S * 4
    assert peak_bytes(step) < 6 * inputs + 6 * block < 0.2 * H * S * S * 4


def test_a_compiled_model_calls_the_same_operator():
    q, k, v = (t.transpose(0, 1)[None] for t in draw(9, 9, torch.float32))
    sinks = SINKS.float()

    def run(q, k, v, sinks):
        seen = visible(9, 9, device=q.device)
        return in_blocks.attention(q, k, v, seen, ScoreRule(window=4, sinks_H=sinks)).sum()

    leaves = [t.contiguous().requires_grad_() for t in (q, k, v, sinks)]
    both = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        y = function(*leaves)
        both.append([y.detach(), *torch.autograd.grad(y, leaves)])
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


@pytest.mark.parametrize(("is_invariant", "keeps"), [(False, False), (False, True), (True, False)])
def test_what_operators_promise_to_pytorch_is_true(is_invariant, keeps):
    q, k, v = (t.transpose(0, 1)[None].contiguous().requires_grad_() for t in draw(5, 7, torch.float32))
    sinks, softcap = SINKS.float().requires_grad_(), None if keeps else 2.0
    arguments = (q, k, v, sinks, None, None, True, 4, None, softcap, is_invariant, keeps)
    torch.library.opcheck(torch.ops.expertmesh.block_attention, arguments)
