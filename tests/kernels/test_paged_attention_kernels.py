"""Attention over pages on a GPU: bits of a row, keys that are hidden, no wait, and builds for every target."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.ops.test_paged_attention import (
    DEVICE,
    RULES,
    SINKS,
    assert_hidden_keys_are_not_read,
    drawn,
    in_other_pages,
    on_device,
)
from tests.support.aot import TARGETS
from tests.support.build_rules import GLOBAL_ATOMIC, MATRIX_INSTRUCTION
from tests.support.launches import as_on, recorded_launches
from tests.support.waits import waits

from expertmesh.kernels import attention_over_pages as kernels
from expertmesh.kernels.tiles import SHARED_BYTES
from expertmesh.ops.attention import paged_triton
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, as_mask, in_window
from expertmesh.ops.attention.visible import visible

SEQUENCES = ((1100, 1), (513, 12), (1, 1), (40, 40), (0, 1), (600, 3))


def launched(q, k, v, keys, rule, **how):
    where = keys.starts, keys.num_keys_B, keys.table_BN
    words = rule.sinks_H, rule.window, rule.chunk, rule.softcap
    return kernels.attend(q, k, v, *where, *words, **how)


attend = on_device(launched)


@pytest.mark.parametrize("rule", ["plain", "all"])
def test_a_row_has_the_same_bits_in_every_launch(rule):
    """With other programs, on other pages, alone, and in chunks of other sizes."""
    rule = RULES[rule]
    q, k, v, keys = drawn(SEQUENCES, 3, 40, 24, dtype=torch.bfloat16)
    whole = attend(q, k, v, keys, rule, side_by_side=False)
    assert torch.equal(attend(q, k, v, keys, rule, side_by_side=True), whole)
    moved = in_other_pages(k, v, keys, 5, seed=1)
    assert torch.equal(attend(q, *moved, rule), whole)
    for b, (num, queries) in enumerate(SEQUENCES):
        start, table = int(keys.starts[b]), keys.table_BN[b : b + 1, : -(-num // 16) or 1]
        cuts = sorted({0, queries // 3, queries - 1, queries})
        for first, stop in zip(cuts, cuts[1:], strict=False):
            seen = num and num - queries + stop
            own = PagedKeys(torch.tensor([0, stop - first]), torch.tensor([seen]), table)
            rows = slice(start + first, start + stop)
            for side_by_side in (False, True):
                found = attend(q[rows], k, v, own, rule, side_by_side=side_by_side)
                assert torch.equal(found, whole[rows])
    assert not whole[keys.starts[4] : keys.starts[5]].any()


def test_hidden_keys_and_pages_behind_the_last_one_are_not_read():
    assert_hidden_keys_are_not_read(attend)


@pytest.mark.parametrize("rule", ["plain", "all"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_padded_sequences_have_the_bits_of_pages(rule, padding):
    """As training has them with the engine's: policies are compared to the bit."""
    rule, (B, S, heads, d, n) = replace(RULES[rule], window=40), (3, 52, 2, 24, 16)
    lengths = [S, 31, 7] if padding else [S] * B
    q, k, v = (torch.randn(B, h, S, size).to(DEVICE, torch.bfloat16) for h, size in ((6, d), (heads, d), (heads, n)))
    if rule.sinks_H is not None:
        rule = replace(rule, sinks_H=rule.sinks_H.to(DEVICE))
    firsts = [S - length if padding == "left" else 0 for length in lengths]
    is_token_BS = torch.tensor([[f <= i < f + m for i in range(S)] for f, m in zip(firsts, lengths, strict=True)])
    seen = visible(S, S, device=q.device, is_token_BL=is_token_BS.to(DEVICE) if padding else None)
    mask = None if seen.mask is None else seen.mask[:, 0]
    if mask is not None:
        mask = as_mask(in_window(seen, rule, num_keys=S, device=q.device), num_keys=S, device=q.device)[:, 0]
    own = rule if mask is None else replace(rule, window=None, chunk=None)
    y = paged_triton.of_sequences(q, k, v, seen.first_B, mask, rule=own)
    for b, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        part = slice(first, first + length)
        tail = (0, 0, 0, 0, 0, -length % 16)
        pages = (F.pad(t[b, :, part].transpose(0, 1), tail).unflatten(0, (-1, 16)) for t in (k, v))
        table = torch.arange(-(-length // 16), device=DEVICE)[None]
        keys = PagedKeys(torch.tensor([0, length], device=DEVICE), torch.tensor([length], device=DEVICE), table)
        alone = paged_triton.attend(q[b, :, part].transpose(0, 1), *pages, keys, rule)
        assert torch.equal(y[b, :, part].transpose(0, 1), alone)


def of_model(name, dtype=torch.bfloat16):
    """Queries, pages and places of 64 or 4 sequences of up to 8,192 keys, without values."""
    T, H, heads, d = {
        "grouped": (64, 32, 4, 128),
        "masked": (64, 32, 4, 128),
        "wide": (4, 8, 4, 256),
        "latent": (4, 128, 1, 576),
        "odd": (4, 6, 2, 80),
    }[name]
    empty = partial(torch.empty, device="meta")
    q, pages = empty(T, H, d, dtype=dtype), empty(99, 32, heads, d, dtype=dtype)
    whole = partial(empty, dtype=torch.int64)
    return q, pages, pages, PagedKeys(whole(T + 1), whole(T), whole(T, 256))


@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_nothing_waits_for_the_gpu(name):
    q, k, v, keys = of_model(name)
    with as_on("sm_90"), recorded_launches(kernels) as launches, waits() as watch:
        y = paged_triton.attend(q, k, v, keys, PLAIN)
    assert y.shape == q.shape
    assert [one.name for one in launches] == ["attend", "merge_parts"]
    assert watch.found == []


BUILDS = {
    "grouped": (False, PLAIN, torch.bfloat16),
    "masked": (False, PLAIN, torch.bfloat16),
    "wide": (True, RULES["window"], torch.bfloat16),
    "latent": (False, PLAIN, torch.bfloat16),
    "odd": (False, replace(RULES["all"], sinks_H=SINKS), torch.float32),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("target", list(TARGETS))
def test_built(target, name):
    side_by_side, rule, dtype = BUILDS[name]
    if rule.sinks_H is not None:
        rule = replace(rule, sinks_H=rule.sinks_H.to("meta"))
    with as_on(target), recorded_launches(kernels) as launches:
        mask_TL = torch.empty(64, 8192, dtype=torch.bool, device="meta") if name == "masked" else None
        launched(*of_model(name, dtype), rule, side_by_side=side_by_side, mask_TL=mask_TL)
    for launch in launches:
        made = launch.build(target)
        assert made.spill_bytes <= (48 if name == "masked" else 0)
        assert made.shared_bytes <= SHARED_BYTES[target]
        assert not re.search(GLOBAL_ATOMIC[target[:2]], made.assembly)
        if launch.name == "attend" and name in ("grouped", "masked"):
            assert MATRIX_INSTRUCTION[target] in made.assembly
