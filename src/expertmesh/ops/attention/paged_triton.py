"""Attention over pages on a GPU by the Triton kernel: a row has the same bits in every batch."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.backend import runs_triton

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether `attend` takes these tensors: on a GPU with Triton, one type, numbers of a head adjacent."""
    return (
        runs_triton(q_THd.device)
        and q_THd.dtype in _DTYPES
        and all(t.dtype == q_THd.dtype and t.stride(-1) == 1 for t in (k_NShd, v_NShd))
    )


def attend(
    q_THd: Tensor,
    k_NShd: Tensor,
    v_NShd: Tensor,
    keys: PagedKeys,
    rule: ScoreRule,
    *,
    mask_TL: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """See `expertmesh.ops.attention.paged_attention.paged_attention`; `mask_TL` is of the keys of a row's sequence."""
    from expertmesh.kernels import attention_over_pages

    return attention_over_pages.attend(
        q_THd if q_THd.stride(-1) == 1 else q_THd.contiguous(),
        k_NShd,
        v_NShd,
        keys.starts,
        keys.num_keys_B,
        keys.table_BN,
        rule.sinks_H,
        rule.window,
        rule.chunk,
        rule.softcap,
        mask_TL=mask_TL,
    )


def of_sequences(
    q_BHSd: Tensor,
    k_BHLd: Tensor,
    v_BHLd: Tensor,
    first_B: Tensor | None = None,
    mask_BSL: Tensor | None = None,
    *,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """Causal attention of the last S of L tokens of B sequences, (B, H, S, n), with the bits of `attend`; a key is a
    page, so that no length compiles anew."""
    (B, H, S, _), L, device = q_BHSd.shape, k_BHLd.shape[2], q_BHSd.device
    columns_BL = torch.arange(L, device=device).expand(B, L)
    lengths_B = torch.full((B,), L, dtype=torch.int64, device=device)
    if first_B is not None:
        columns_BL, lengths_B = (columns_BL + first_B[:, None]).clamp(max=L - 1), lengths_B - first_B
    sequences_B = torch.arange(B + 1, device=device)
    keys = PagedKeys(sequences_B * S, lengths_B, columns_BL + sequences_B[:B, None] * L)
    if mask_BSL is not None:
        mask_BSL = mask_BSL.gather(2, columns_BL[:, None].expand(B, S, L)).flatten(0, 1)
    k_NShd, v_NShd = (t.transpose(1, 2).flatten(0, 1)[:, None] for t in (k_BHLd, v_BHLd))
    y_THd = attend(q_BHSd.transpose(1, 2).flatten(0, 1), k_NShd, v_NShd, keys, rule, mask_TL=mask_BSL)
    return y_THd.view(B, S, H, -1).transpose(1, 2)
