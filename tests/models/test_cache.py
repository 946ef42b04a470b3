"""The key-value cache: cached results are the uncached ones, however the tokens arrive."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.numerics import assert_close_fp64
from torch import Tensor

from expertmesh.config.moe import MoEConfig
from expertmesh.engine.lockstep import pad_prompts
from expertmesh.errors import ConfigError
from expertmesh.models.cache import KVCache
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

VOCAB, SEQ = 50, 14


def model(*, dtype: torch.dtype = torch.float64, **options: Any) -> GPT:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_seq_len": 24,
        "dim": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_dim": 28,
        "init_std": 0.2,
        "moe_every": 2,
        "moe": MoEConfig(num_experts=(4,), top_k=2, hidden_dim=20, residual=True),
    }
    return GPT(ModelConfig(**(defaults | options)), dtype=dtype, seed=0).eval()


def token_ids(batch: int = 2, seq_len: int = SEQ) -> Tensor:
    return torch.randint(VOCAB, (batch, seq_len), generator=torch.Generator().manual_seed(1))


def cached(gpt, ids, cache, mask=None):
    return gpt(ids, token_mask_BS=mask, context=cache.begin(ids, token_mask_BS=mask))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(cuts=st.lists(st.integers(1, SEQ - 1), unique=True).map(sorted), qk_norm=st.booleans())
def test_cached_logits_equal_uncached_ones(cuts: list[int], qk_norm: bool) -> None:
    gpt = model(qk_norm=qk_norm)
    ids = token_ids()
    cache = gpt.new_cache(batch_size=2, max_len=SEQ)
    edges = [0, *cuts, SEQ]
    parts = [cached(gpt, ids[:, a:b], cache).logits_BSV for a, b in zip(edges, edges[1:], strict=False)]
    assert_close_fp64(torch.cat(parts, 1), gpt(ids).logits_BSV, what="cached logits")
    assert cache.length == SEQ


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    cut=st.integers(1, 7),
    new_tokens=st.integers(1, 4),
)
def test_left_padded_prompts_get_their_own_logits(lengths: list[int], cut: int, new_tokens: int) -> None:
    gpt = model()
    ids = token_ids(len(lengths), 8)
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    more = token_ids(len(lengths), new_tokens) + 1
    more %= VOCAB
    padded, mask = pad_prompts(prompts, "left")
    width = padded.shape[1]
    cache = gpt.new_cache(batch_size=len(lengths), max_len=width + new_tokens)
    first = min(cut, width)
    for part in (slice(0, first), slice(first, width)):
        if part.start < part.stop:
            part_mask = None if mask is None else mask[:, part]
            logits = cached(gpt, padded[:, part], cache, part_mask).logits_BSV
    steps = [logits[:, -1]]
    steps += [cached(gpt, more[:, i : i + 1], cache).logits_BSV[:, 0] for i in range(new_tokens)]
    for row, prompt in enumerate(prompts):
        alone = gpt(torch.tensor([prompt + more[row].tolist()])).logits_BSV[0]
        for i, step in enumerate(steps):
            assert_close_fp64(step[row], alone[len(prompt) - 1 + i], what=f"row {row} step {i}")


def test_nothing_is_allocated_while_decoding() -> None:
    gpt = model()
    cache = gpt.new_cache(batch_size=2, max_len=SEQ)
    before = (cache._k.data_ptr(), cache._v.data_ptr())
    for column in token_ids().split(1, dim=1):
        cached(gpt, column, cache)
    assert (cache._k.data_ptr(), cache._v.data_ptr()) == before
    assert cache._k.nbytes == cache._v.nbytes == 3 * 2 * 2 * SEQ * 6 * 8


def test_full_cache_is_an_error() -> None:
    gpt = model()
    cache = gpt.new_cache(batch_size=2, max_len=4)
    cached(gpt, token_ids()[:, :3], cache)
    with pytest.raises(ConfigError, match="5 tokens: the cache holds 4"):
        cached(gpt, token_ids()[:, 3:5], cache)


def test_cache_longer_than_the_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_seq_len=24"):
        KVCache(model().config, batch_size=1, max_len=25)


def test_cache_dtype_follows_autocast() -> None:
    gpt = model(dtype=torch.float32)
    ids = token_ids()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = gpt.new_cache(batch_size=2, max_len=SEQ)
        parts = [cached(gpt, part, cache).logits_BSV for part in (ids[:, :9], ids[:, 9:])]
    assert cache._k.dtype == cache._v.dtype == torch.bfloat16
    assert torch.cat(parts, 1).isfinite().all()
