"""Attention over pages by every implementation: close to FP64, and the kernels' rows with the same bits in every
batch."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.oracle.numerics import assert_two_times

from expertmesh.kernels.cpu.library import Loaded, loaded
from expertmesh.ops.attention import (
    paged_gathered,
    paged_native,
    paged_triton,
    paged_varlen,
)
from expertmesh.ops.attention.paged_attention import IMPLEMENTATIONS
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.attention.visible import visible
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H = 6
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0, -20.0, 1.5])
RULES = {
    "plain": PLAIN,
    "window": ScoreRule(window=70),
    "window of one": ScoreRule(window=1),
    "chunk": ScoreRule(chunk=50),
    "cap": ScoreRule(softcap=1.5),
    "sinks": ScoreRule(sinks_H=SINKS),
    "all": ScoreRule(window=100, chunk=64, softcap=2.0, sinks_H=SINKS),
}
MIXED = ((1, 1), (64, 1), (65, 1), (130, 40), (300, 77), (20, 20), (0, 2), (9, 0))
"""(keys, queries) of each sequence: single queries, chunks of prompts, a whole prompt, padding rows, none."""
PROMPTS = ((300, 140), (256, 256), (513, 1), (20, 20))
SIZES = {
    "heads of 16": (MIXED, 3, 16, 16),
    "heads of 24": (MIXED, 2, 24, 24),
    "one head each": (MIXED, 6, 64, 64),
    "latent": (MIXED, 1, 72, 72),
    "long": (((8192, 1), (700, 3)), 3, 32, 16),
}


def drawn(sequences, heads, d, n, *, page_size=16, dtype=torch.float64, seed=0):
    """Queries and pages of sequences, in a random order of pages."""
    torch.manual_seed(seed)
    width = max(-(-keys // page_size) for keys, _ in sequences) + 1
    num = width * len(sequences)
    table = torch.randperm(num).view(len(sequences), width)
    counts = torch.tensor([0, *(queries for _, queries in sequences)])
    keys = PagedKeys(counts.cumsum(0), torch.tensor([keys for keys, _ in sequences]), table)
    q = torch.randn(int(counts.sum()), H, d)
    k, v = (torch.randn(num, page_size, heads, size) for size in (d, n))
    return *(t.to(dtype) for t in (q, k, v)), keys


def by_products(q, k_pages, v_pages, keys, rule, dtype):
    """One sequence after the other, all scores at once, with sums in one type."""
    y = torch.zeros(*q.shape[:2], v_pages.shape[3], dtype=dtype)
    q, k_pages, v_pages = (t.to(dtype) for t in (q, k_pages, v_pages))
    for b, num in enumerate(keys.num_keys_B.tolist()):
        first, stop = keys.starts[b : b + 2].tolist()
        if not num or first == stop:
            continue
        k, v = (
            pages[keys.table_BN[b]].flatten(0, 1)[:num].repeat_interleave(H // pages.shape[2], 1)
            for pages in (k_pages, v_pages)
        )
        s = torch.einsum("shd,lhd->hsl", q[first:stop], k) * q.shape[2] ** -0.5
        if rule.softcap is not None:
            s = rule.softcap * torch.tanh(s / rule.softcap)
        key, at = torch.arange(num), torch.arange(num - stop + first, num)[:, None]
        hidden = (key > at) | (key <= at - (rule.window or num))
        if rule.chunk is not None:
            hidden |= key // rule.chunk != at // rule.chunk
        s = s.masked_fill(hidden, -torch.inf)
        if rule.sinks_H is not None:
            s = torch.cat((s, rule.sinks_H.to(dtype)[:, None, None].expand(-1, len(at), 1)), 2)
        y[first:stop] = torch.einsum("hsl,lhd->shd", s.softmax(2)[..., :num], v)
    return y


def needs_kernels():
    if loaded().kernels is None:
        pytest.skip("no C compiler")


def native(*call):
    """By the kernels in C, without which a test is skipped."""
    needs_kernels()
    assert paged_native.serves(*call[:3])
    return paged_native.attend(*call)


def on_device(attend):
    """On the GPU, where there is one."""

    def moved(q, k, v, keys, rule, **how):
        where = {name: getattr(keys, name).to(DEVICE) for name in ("starts", "num_keys_B", "table_BN")}
        sinks = None if rule.sinks_H is None else rule.sinks_H.to(DEVICE)
        q, k, v = (t.to(DEVICE) for t in (q, k, v))
        return attend(q, k, v, replace(keys, **where, memo={}), replace(rule, sinks_H=sinks), **how).cpu()

    return moved


def how(arithmetic):
    return {"attention": arithmetic.attention, "is_invariant": arithmetic.batch_invariant}


def gathered(arithmetic):
    """By padded batches of PyTorch's operators."""
    return on_device(partial(paged_gathered.attend, **how(arithmetic)))


def assert_matrix(attend, size, rule, dtype):
    sequences, heads, d, n = SIZES[size]
    q, k, v, keys = drawn(sequences, heads, d, n, dtype=dtype)
    expected = by_products(q, k, v, keys, rule, torch.float64)
    plain = by_products(q, k, v, keys, rule, torch.float32).to(dtype)
    assert_two_times(attend(q, k, v, keys, rule), plain, expected, what=size, dtype=dtype, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("size", SIZES)
def test_kernels_round_no_worse_than_plain_products(instructions, size, rule, dtype):
    assert_matrix(native, size, rule, dtype)


WAYS = {"ordinary": gathered(DEFAULT_OPS), "invariant": gathered(BATCH_INVARIANT_OPS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)
def test_padded_batches_round_no_worse_than_plain_products(attend, rule, dtype):
    for size in ("heads of 24", "one head each", "latent"):
        assert_matrix(attend, size, rule, dtype)


INTERPRETED = [(torch.bfloat16, size) for size in SIZES] + [(torch.float32, size) for size in ("heads of 24", "latent")]


def interpreted_rules():
    """A cap alone beside one size; "all" has it beside every other."""
    for (dtype, size), rule in itertools.product(INTERPRETED, ("plain", "window of one", "cap", "all")):
        is_again = rule == "cap" and size != "heads of 24"
        yield pytest.param(dtype, size, rule, marks=pytest.mark.exhaustive if is_again else ())


@pytest.mark.parametrize(("dtype", "size", "rule"), [*interpreted_rules()])
def test_the_triton_kernel_rounds_no_worse_than_plain_products(dtype, size, rule):
    assert_matrix(on_device(paged_triton.attend), size, RULES[rule], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["plain", "window", "all"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_on_a_gpu_rounds_no_worse_than_plain_products(name, rule):
    q, k, v, keys = drawn((*PROMPTS, *MIXED), 3, 64, 64, page_size=256, dtype=torch.bfloat16)
    if not IMPLEMENTATIONS[name].serves(*(t.to(DEVICE) for t in (q, k, v))):
        assert name in ("native", "varlen")  # which are for CPUs, and for PyTorch 2.13
        pytest.skip(f"{name} does not serve this GPU")
    attend = on_device(partial(IMPLEMENTATIONS[name].attend, **how(DEFAULT_OPS)))
    found = attend(q, k, v, replace(keys, most_queries=256), RULES[rule])
    expected = by_products(q, k, v, keys, RULES[rule], torch.float64)
    plain = by_products(q, k, v, keys, RULES[rule], torch.float32).bfloat16()
    assert_two_times(found, plain, expected, what=name, dtype=torch.bfloat16, scale=1.0)


def in_other_pages(k, v, keys, page_size, seed):
    """The same keys in pages of another size and order."""
    torch.manual_seed(seed)
    width = max(-(-int(num) // page_size) for num in keys.num_keys_B) + 1
    table = torch.randperm(width * len(keys.table_BN)).view(-1, width)
    moved = [torch.randn(table.numel(), page_size, *t.shape[2:]).to(t.dtype) for t in (k, v)]
    for new, old in zip(moved, (k, v), strict=True):
        for b, num in enumerate(keys.num_keys_B.tolist()):
            key = torch.arange(num)
            at = table[b][key // page_size], key % page_size
            new[at] = old[keys.table_BN[b][key // old.shape[1]], key % old.shape[1]]
    return *moved, replace(keys, table_BN=table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(instructions, rule, dtype, threads):
    """Alone, in batches up to 64, in chunks of a prompt, on other pages, by one thread and by two."""
    sequences = [(1 + 97 * i % 200, 1 + (i % 7 == 0) * (97 * i % 200)) for i in range(64)]
    q, k, v, keys = drawn(sequences, 3, 40, 24, dtype=dtype)
    whole = native(q, k, v, keys, rule)
    threads(2)
    assert torch.equal(native(q, k, v, keys, rule), whole)
    threads(1)
    assert torch.equal(native(q, *in_other_pages(k, v, keys, 5, seed=1), rule), whole)
    for sizes in (1, 2, 17):
        for first in range(0, 64, sizes if sizes > 2 else 9):
            some = slice(first, first + sizes)
            starts = keys.starts[first : first + sizes + 1]
            own = PagedKeys(starts - starts[0], keys.num_keys_B[some], keys.table_BN[some])
            rows = slice(int(starts[0]), int(starts[-1]))
            assert torch.equal(native(q[rows], k, v, own, rule), whole[rows])
    b = max(range(64), key=lambda b: sequences[b][1])
    start, num = int(keys.starts[b]), sequences[b][1]
    for first, stop in ((0, 1), (1, 66), (66, num), (num - 1, num)):  # after a hit of a prefix
        own = PagedKeys(torch.tensor([0, stop - first]), torch.tensor([stop]), keys.table_BN[b : b + 1])
        rows = slice(start + first, start + stop)
        assert torch.equal(native(q[rows], k, v, own, rule), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_pages_have_the_bits_of_exact_attention_without_pages(rule, dtype, processor):
    """By the kernels, and without them by padded batches."""
    exact = BATCH_INVARIANT_OPS.attention
    sequences = ((1, 1), (64, 1), (65, 1), (130, 1), (130, 9), (40, 40))
    q, k, v, keys = drawn(sequences, 3, 24, 24, dtype=dtype)
    for attend in (native, WAYS["invariant"]):
        if attend is not native:
            processor(loaded=Loaded(None))
        found = attend(q, k, v, keys, rule)
        for b, (num, queries) in enumerate(sequences):
            rows = slice(*keys.starts[b : b + 2].tolist())
            own = (t[keys.table_BN[b]].flatten(0, 1)[None, :num].transpose(1, 2) for t in (k, v))
            seen = visible(queries, num, device=q.device)
            expected = exact(q[None, rows].transpose(1, 2), *own, seen, rule)[0].transpose(0, 1)
            assert torch.equal(found[rows], expected)


@pytest.fixture
def threads():
    """Sets the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_operator_keeps_the_rules_of_operators(dtype):
    needs_kernels()
    q, k, v, keys = drawn(MIXED, 3, 16, 24, dtype=dtype)
    where = keys.starts, keys.num_keys_B, keys.table_BN
    for rest in ((None, None, None), (SINKS, 7, 2.0)):
        sinks, window, softcap = rest
        words = (q, k, v, *where, None, None, sinks, window, None, softcap)
        torch.library.opcheck(paged_native._operator, words)


def assert_hidden_keys_are_not_read(attend):
    """Neither keys outside the window nor numbers behind the last page reach a row."""
    q, k, v, keys = drawn(((70, 1), (30, 3)), 3, 16, 16, dtype=torch.float32)
    rule = ScoreRule(window=5)
    expected = attend(q, k, v, keys, rule)
    for t in (k, v):
        for b, (num, queries) in enumerate(((70, 1), (30, 3))):
            flat = t.view(-1, *t.shape[2:])
            places = (keys.table_BN[b][:, None] * 16 + torch.arange(16)).flatten()
            flat[places[: num - queries - 4]] = flat[places[num:]] = torch.nan
    table = keys.table_BN.clone()
    table[0, 5:] = table[1, 2:] = 10**9
    assert torch.equal(attend(q, k, v, replace(keys, table_BN=table), rule), expected)


def test_hidden_keys_and_pages_behind_the_last_one_are_not_read():
    assert_hidden_keys_are_not_read(native)


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how):
    """`varlen_attn` as its documentation has it."""
    window, table, lengths = how["window_size"], how["block_table"], how["seqused_k"]
    assert {t.dtype for t in (cu_seq_q, table, lengths)} == {torch.int32}
    assert cu_seq_k is None and how["enable_gqa"] and window[1] == 0
    assert max_q == int(cu_seq_q.diff().max()) and max_k >= int(lengths.max())
    rule = ScoreRule(window=None if window[0] < 0 else window[0] + 1)
    keys = PagedKeys(cu_seq_q.long(), lengths.long(), table.long())
    return by_products(query, key, value, keys, rule, torch.float32).to(query.dtype)


@pytest.mark.parametrize(
    ("rule", "most", "is_invariant", "by"),
    [
        ("plain", 256, False, "varlen"),
        ("window", 256, False, "varlen"),
        ("window of one", 256, False, "varlen"),
        ("plain", 256, True, "triton"),
        ("plain", 127, False, "triton"),
        ("plain", None, False, "triton"),
        ("chunk", 256, False, "triton"),
        ("cap", 256, False, "triton"),
        ("sinks", 256, False, "triton"),
    ],
)
def test_prompts_by_pytorchs_kernel(monkeypatch, rule, most, is_invariant, by):
    """Calls of `varlen_attn` against a stand-in, as it runs on GPUs only; what it does not know is left to Triton."""
    q, k, v, keys = drawn(PROMPTS, 3, 32, 32, page_size=256, dtype=torch.bfloat16)
    called, rule = [], RULES[rule]

    def varlen(*call, **how):
        called.append("varlen")
        return stand_in(*call, **how)

    def triton(*call, **how):
        called.append("triton")
        return by_products(*call, torch.float32).bfloat16()

    monkeypatch.setattr(paged_varlen, "varlen_attn", varlen)
    monkeypatch.setattr(paged_triton, "attend", triton)
    keys = replace(keys, most_queries=most)
    y = paged_varlen.attend(q, k, v, keys, rule, is_invariant=is_invariant, attention=None)
    assert called == [by]
    assert torch.equal(y, by_products(q, k, v, keys, rule, torch.float32).bfloat16())


@pytest.mark.parametrize(
    ("page_size", "d", "n", "dtype", "fits"),
    [
        (256, 64, 64, torch.bfloat16, True),
        (512, 256, 256, torch.float16, True),
        (32, 64, 64, torch.bfloat16, False),
        (256, 64, 64, torch.float32, False),
        (256, 72, 64, torch.bfloat16, False),
        (256, 576, 576, torch.bfloat16, False),
    ],
)
def test_what_pytorchs_kernel_takes(page_size, d, n, dtype, fits):
    q, k, v, _ = drawn(((9, 1),), 3, d, n, page_size=page_size, dtype=dtype)
    assert paged_varlen.fits(q, k, v) == fits
    assert not paged_varlen.serves(q, k, v), "on a CPU"
    assert paged_varlen._HAS_PAGES or torch.__version__ < (2, 13)  # older: prompts are the Triton kernel's, too
