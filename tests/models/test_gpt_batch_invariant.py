"""ModelConfig.batch_invariant: the logits of a token have the same bits in every batch, padding and cache included."""

from typing import Any

import pytest
import torch
from tests.oracle import numerics
from torch import Tensor

from expertmesh.config.moe import MoEConfig
from expertmesh.engine.lockstep import pad_prompts
from expertmesh.errors import ConfigError
from expertmesh.models.cache import KVCache
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS

VOCAB, LONGEST = 43, 150
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def model(dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_seq_len": LONGEST,
        "dim": 26,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_hidden_dim": 19,
        "qk_norm": True,
        "init_std": 0.4,
        "batch_invariant": True,
        "moe": MoEConfig(num_experts=(4,), hidden_dim=21, num_shared_experts=1),
    }
    return GPT(ModelConfig(**(defaults | options)), dtype=dtype, seed=0).eval()


def logits(gpt: GPT, ids_BS: Tensor, **call: Any) -> Tensor:
    with torch.no_grad():
        return gpt(ids_BS, **call).logits_BSV


def cached(gpt: GPT, cache: KVCache, ids_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    context = cache.begin(ids_BS, token_mask_BS=mask_BS, counts_padding=gpt.counts_padding)
    return logits(gpt, ids_BS, token_mask_BS=mask_BS, context=context)


def sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_any_size_order_and_length(dtype: torch.dtype) -> None:
    gpt = model(dtype)
    ids_BS = torch.tensor(sequences(*[70] * 5))
    whole = logits(gpt, ids_BS)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 4)):
        assert torch.equal(logits(gpt, ids_BS[rows]), whole[rows])
    order = torch.tensor([4, 0, 2, 1, 3])
    assert torch.equal(logits(gpt, ids_BS[order]), whole[order])
    for length in (1, 17, 64, 65):
        assert torch.equal(logits(gpt, ids_BS[2:4, :length]), whole[2:4, :length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_batches_with_padding_on_either_side(dtype: torch.dtype) -> None:
    gpt = model(dtype)
    prompts = sequences(5, 66, 1, 33)
    alone = [logits(gpt, torch.tensor([prompt]))[0] for prompt in prompts]
    left_BS, mask_BS = pad_prompts(prompts, "left")
    assert mask_BS is not None
    found = logits(gpt, left_BS, token_mask_BS=mask_BS)
    right = logits(gpt, left_BS.flip(1), token_mask_BS=mask_BS.flip(1))
    mirrored = [logits(gpt, torch.tensor([prompt[::-1]]))[0] for prompt in prompts]
    for b, prompt in enumerate(prompts):
        assert torch.equal(found[b, -len(prompt) :], alone[b])
        assert torch.equal(right[b, : len(prompt)], mirrored[b])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_changes_nothing_either(dtype: torch.dtype) -> None:
    gpt = model(dtype)
    prompts = sequences(70, 67)
    alone = [logits(gpt, torch.tensor([prompt]))[0] for prompt in prompts]
    ids_BS, mask_BS = pad_prompts(prompts, "left")
    assert mask_BS is not None
    cache = KVCache(gpt.config, batch_size=2, dtype=dtype)
    start = 0
    for size in (9, 50, 1, 1, 4, 1, 4):
        part = slice(start, start + size)
        found = cached(gpt, cache, ids_BS[:, part], mask_BS[:, part])
        for b in range(2):
            real = mask_BS[b, part]
            first = int(mask_BS[b, :start].sum())
            assert torch.equal(found[b, real], alone[b][first : first + int(real.sum())])
        start += size
    assert start == 70
    unmasked = KVCache(gpt.config, batch_size=1, dtype=dtype)
    for part in (slice(0, 66), slice(66, 67), slice(67, 70)):
        found = cached(gpt, unmasked, ids_BS[:1, part], None)
        assert torch.equal(found[0], alone[0][part])


def test_autocast_and_a_dense_model_with_an_untied_head() -> None:
    gpt = model(moe=MoEConfig(num_experts=()), tie_embeddings=False, qk_norm=False)
    ids_BS = torch.tensor(sequences(*[21] * 4))
    with torch.autocast("cpu", torch.bfloat16):
        whole = logits(gpt, ids_BS)
        assert torch.equal(logits(gpt, ids_BS[1:2]), whole[1:2])


def test_it_is_the_same_model() -> None:
    """FP64: logits and gradients agree with the default mode's to rounding, padding on the left included."""
    mine, plain = model(torch.float64), model(torch.float64, batch_invariant=False)
    ids_BS, mask_BS = pad_prompts(sequences(9, 14), "left")
    assert mask_BS is not None
    results = []
    for gpt in (mine, plain):
        output = gpt(ids_BS, token_mask_BS=mask_BS).logits_BSV[mask_BS]
        output.sin().sum().backward()
        results.append([output.detach(), *(p.grad for p in gpt.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for name, ours, theirs in zip(range(99), *results, strict=False):
        numerics.assert_close_fp64(ours, theirs, what=f"result {name}")


def test_training_is_the_default_mode() -> None:
    ids_BS = torch.tensor(sequences(9, 9))
    outputs = [logits(model(batch_invariant=on).train(), ids_BS) for on in (True, False)]
    assert torch.equal(*outputs)


def test_a_query_that_may_look_nowhere_gets_zeros() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    mask = torch.tensor([[False] * 3, [True, False, False], [True] * 3])[None, None]
    y = BATCH_INVARIANT_OPS.attention(q, k, k, Visible(3, mask=mask))
    assert not y[:, :, 0].any()
    assert torch.equal(y[:, :, 1], k[:, :, 0].expand(1, 2, 4))


def test_the_switch_reaches_the_layers_and_what_it_cannot_hold_for_is_refused() -> None:
    assert all(block.moe.arithmetic.batch_invariant for block in model().layers)
    assert not any(block.moe.arithmetic.batch_invariant for block in model(batch_invariant=False).layers)
    with pytest.raises(ConfigError, match=r"moe\.eval_capacity_factor=1\.5"):
        model(moe=MoEConfig(num_experts=(4,), eval_capacity_factor=1.5))
