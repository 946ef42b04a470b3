"""Attention over pages on a GPU by the Triton kernel: a row has the same bits in every batch."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.backend import runs_triton

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether `attend` takes these tensors: on a GPU with Triton, one type, numbers of a head adjacent."""
    return (
        runs_triton(q_THd.device)
        and q_THd.dtype in _DTYPES
        and all(t.dtype == q_THd.dtype and t.stride(-1) == 1 for t in (k_NShd, v_NShd))
    )


def attend(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor, keys: PagedKeys, rule: ScoreRule, **how: Any) -> Tensor:
    """See `expertmesh.ops.attention.paged_attention.paged_attention`."""
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
    )
