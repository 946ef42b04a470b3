"""A call of the attention in C: the struct that `attention.c` declares."""

import ctypes

import torch
from torch import Tensor

KINDS_OF_KEYS = {torch.float32: 0, torch.bfloat16: 1}
"""Types of queries, keys and values as `vectors.h` numbers them."""

_POINTERS = ("q", "k", "v", "y", "starts", "num_keys", "table", "first", "mask", "sinks")
_SIZES = (
    *(f"{name}_of_{level}" for name, level in (("q", "token"), ("q", "head"))),
    *(f"{name}_of_{level}" for name in "kv" for level in ("page", "slot", "head")),
    *("mask_of_sequence", "mask_of_query", "table_width", "page_size"),
    *("num_sequences", "num_heads", "num_key_heads", "key_dim", "value_dim", "kind"),
    *("window", "chunk", "num_threads"),
)


class AttentionCall(ctypes.Structure):
    """Arguments of a call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    )

    @classmethod
    def of(
        cls,
        q_THd: Tensor,  # (T, H, d) float32 or bfloat16; numbers of a head are adjacent, as in the pages
        k_NShd: Tensor,  # (pages, page size, heads, d) of the same type
        v_NShd: Tensor,  # (pages, page size, heads, n)
        y_THd: Tensor,  # (T, H, n), contiguous; the result
        *,
        starts: Tensor,  # (B + 1,) contiguous int64
        num_keys_B: Tensor,  # (B,) contiguous int64
        table_BN: Tensor,  # (B, N) contiguous int64
        first_B: Tensor | None = None,  # (B,) contiguous int64 place of each sequence's first key in its pages; None: 0
        mask_BSP: Tensor | None = None,
        sinks_H: Tensor | None = None,  # (H,) contiguous float32, or None
        window: int | None = None,  # see `ScoreRule`
        chunk: int | None = None,  # see `ScoreRule`
        softcap: float | None = None,  # see `ScoreRule`
    ) -> tuple["AttentionCall", tuple[Tensor | None, ...]]:
        """A call, and the tensors that must live until it has returned; for the arguments see
        `expertmesh.ops.attention.paged_native.attention`.

        Args:
            mask_BSP: (B, S, places) bool, True for keys that may be seen, adjacent; None: all that the rule lets
                through.
        """
        size = q_THd.element_size()
        mask_strides = (0, 0) if mask_BSP is None else mask_BSP.stride()[:2]
        distances = (*q_THd.stride()[:2], *k_NShd.stride()[:3], *v_NShd.stride()[:3])
        (_, H, d), heads = q_THd.shape, k_NShd.shape[2]
        optional = (first_B, mask_BSP, sinks_H)
        tensors = (q_THd, k_NShd, v_NShd, y_THd, starts, num_keys_B, table_BN, *optional)
        call = cls(
            *(None if t is None else t.data_ptr() for t in tensors),
            *(distance * size for distance in distances),
            *mask_strides,
            table_BN.shape[1],
            k_NShd.shape[1],
            len(num_keys_B),
            H,
            heads,
            d,
            v_NShd.shape[3],
            KINDS_OF_KEYS[q_THd.dtype],
            window or 0,
            chunk or 0,
            1,
            d**-0.5,
            softcap or 0.0,
        )
        return call, tensors
