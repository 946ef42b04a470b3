"""Attention over pages on NVIDIA by PyTorch's FlashAttention (`varlen_attn`), for prompts; the rest is the Triton
kernel's."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.attention import paged_triton
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import ScoreRule

varlen_attn: Any = None
with suppress(ImportError):  # of an older PyTorch
    from torch.nn.attention.varlen import varlen_attn

FEWEST_QUERIES = 128
"""Queries of a sequence from which a step is one of prompts."""
_PAGE = 256
"""FlashAttention 2 takes pages of a multiple of so many tokens."""
_MOST_HEAD = 256
_HAS_PAGES = varlen_attn is not None and "block_table" in inspect.signature(varlen_attn).parameters


def serves(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether `attend` takes these tensors: as the Triton kernel, on NVIDIA, 16 bits, in large pages, keys as long as
    values."""
    return (
        _HAS_PAGES
        and torch.version.hip is None
        and paged_triton.serves(q_THd, k_NShd, v_NShd)
        and fits(q_THd, k_NShd, v_NShd)
    )


def fits(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether FlashAttention takes tensors of these types and sizes."""
    return (
        q_THd.dtype in (torch.bfloat16, torch.float16)
        and k_NShd.shape[1] % _PAGE == 0
        and q_THd.shape[-1] == k_NShd.shape[-1] == v_NShd.shape[-1] <= _MOST_HEAD
    )


def attend(
    q_THd: Tensor,
    k_NShd: Tensor,
    v_NShd: Tensor,
    keys: PagedKeys,
    rule: ScoreRule,
    *,
    is_invariant: bool,
    **how: Any,
) -> Tensor:
    """See `expertmesh.ops.attention.paged_attention.paged_attention`."""
    most = keys.most_queries
    is_known = rule.is_plain and rule.chunk is None
    if is_invariant or not is_known or most is None or most < FEWEST_QUERIES:
        return paged_triton.attend(q_THd, k_NShd, v_NShd, keys, rule, **how)
    if "int32" not in keys.memo:
        whole = keys.starts, keys.num_keys_B, keys.table_BN
        keys.memo["int32"] = tuple(t.to(torch.int32) for t in whole)
    starts, num_keys_B, table_BN = keys.memo["int32"]
    y_THd: Tensor = varlen_attn(
        q_THd.contiguous(),
        k_NShd,
        v_NShd,
        starts,
        None,
        most,
        table_BN.shape[1] * k_NShd.shape[1],
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        enable_gqa=True,
        seqused_k=num_keys_B,
        block_table=table_BN,
    )
    return y_THd
