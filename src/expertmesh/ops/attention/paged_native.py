"""Attention over pages on a CPU by the kernels in C (`kernels/cpu/attention.c`): a row has the same bits in every
batch."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.attention_call import KINDS_OF_KEYS, AttentionCall
from expertmesh.kernels.cpu.library import loaded
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.plain_call import cpu_operator, runs_plainly


def serves(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether `attend` takes these tensors: FP32 or BF16 on a CPU, numbers of a head adjacent."""
    return (
        q_THd.dtype in KINDS_OF_KEYS
        and all(t.is_cpu and t.dtype == q_THd.dtype and t.stride(-1) == 1 for t in (k_NShd, v_NShd))
        and q_THd.is_cpu
        and loaded().kernels is not None
    )


def attend(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor, keys: PagedKeys, rule: ScoreRule, **_: Any) -> Tensor:
    """See `expertmesh.ops.attention.paged_attention.paged_attention`."""
    run = attention if runs_plainly(q_THd, k_NShd, v_NShd, rule.sinks_H) else _operator
    y_THd: Tensor = run(
        q_THd,
        k_NShd,
        v_NShd,
        keys.starts,
        keys.num_keys_B,
        keys.table_BN,
        None,
        None,
        rule.sinks_H,
        rule.window,
        rule.chunk,
        rule.softcap,
    )
    return y_THd


def attention(
    q_THd: Tensor,  # (T, H, d) queries
    k_NShd: Tensor,  # (pages, page size, heads, d) keys
    v_NShd: Tensor,  # (pages, page size, heads, n) values
    starts: Tensor,  # (B + 1,) int64
    num_keys_B: Tensor,  # (B,) int64
    table_BN: Tensor,  # (B, N) int64
    first_B: Tensor | None,  # (B,) int64 place of each sequence's first key in its pages; None: 0
    mask_BSP: Tensor | None,
    sinks_H: Tensor | None,  # (H,) sinks
    window: int | None,  # keys of the window
    chunk: int | None,  # positions of a chunk
    softcap: float | None,  # the soft cap
) -> Tensor:
    """Compute the attention; for the arguments see `PagedKeys` and `ScoreRule`.

    Args:
        mask_BSP: (B, S, places) bool, True for keys that may be seen; None: all that the rule lets through.

    Returns:
        (T, H, n); rows that see no key, and have no sink, are 0.
    """
    kernels = loaded().kernels
    if kernels is None:
        raise ConfigError(
            "this graph computes attention by the kernels in C, which are not here; install a C compiler, or export "
            "it again"
        )
    q_THd = q_THd if q_THd.stride(-1) == 1 else q_THd.contiguous()
    y_THd = q_THd.new_empty(*q_THd.shape[:2], v_NShd.shape[3])
    if mask_BSP is not None and mask_BSP.stride(-1) != 1:
        mask_BSP = mask_BSP.contiguous()
    call, tensors = AttentionCall.of(
        q_THd,
        k_NShd,
        v_NShd,
        y_THd,
        starts=starts.contiguous(),
        num_keys_B=num_keys_B.contiguous(),
        table_BN=table_BN.contiguous(),
        first_B=None if first_B is None else first_B.contiguous(),
        mask_BSP=mask_BSP,
        sinks_H=None if sinks_H is None else sinks_H.to(torch.float32).contiguous(),
        window=window,
        chunk=chunk,
        softcap=softcap,
    )
    kernels.attention(call, *tensors)
    return y_THd


def of_sequences(
    q_BHSd: Tensor,
    k_BHLd: Tensor,
    v_BHLd: Tensor,
    first_B: Tensor | None = None,
    mask_BSL: Tensor | None = None,
    *,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """Causal attention of the last S of L tokens of B sequences, (B, H, S, n); a sequence is one page."""
    B, H, S, _ = q_BHSd.shape
    L, sequences_B = k_BHLd.shape[2], torch.arange(B + 1)
    q_THd = q_BHSd.transpose(1, 2).flatten(0, 1)
    k_BLHd, v_BLHd = k_BHLd.transpose(1, 2), v_BHLd.transpose(1, 2)
    lengths_B = torch.full((B,), L) if first_B is None else L - first_B
    where = (sequences_B * S, lengths_B, sequences_B[:B, None], first_B, mask_BSL)
    how = rule.sinks_H, rule.window, rule.chunk, rule.softcap
    y_THd = attention(q_THd, k_BLHd, v_BLHd, *where, *how)
    return y_THd.view(B, S, H, v_BHLd.shape[3]).transpose(1, 2)


_operator = cpu_operator(
    "native_attention(Tensor q_THd, Tensor k_NShd, Tensor v_NShd, Tensor starts, Tensor num_keys_B, Tensor table_BN, "
    "Tensor? first_B, Tensor? mask_BSP, Tensor? sinks_H, int? window, int? chunk, float? softcap) -> Tensor",
    attention,
    lambda q_THd, k_NShd, v_NShd, *_: q_THd.new_empty(*q_THd.shape[:2], v_NShd.shape[3]),
)
