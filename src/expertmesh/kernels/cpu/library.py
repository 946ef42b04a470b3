"""Calls of the compiled kernels: tensors' addresses and sizes, written into the structs that `work.h` declares."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
"""Stored types as `weights.h` numbers them; uint8 holds two numbers of 4 bits."""
INNER = {"silu": 0, "gelu": 1, "relu": 2, "relu2": 3, "clamped_silu": 4}
"""Point-wise functions as `activations.h` numbers them."""


@dataclass(frozen=True)
class Stored:
    """Matrices of experts with their scales and biases.

    Attributes:
        numbers_EGNK: (E, G, N, K), or (E, G, N, K / 2) bytes for 4 bits; numbers of a row are adjacent.
        scales_EGNS: (E, G, N, S) float32 or bfloat16, S = 1 for int8; None for dense numbers.
        bias_EGN: (E, G, N) float32 or bfloat16, or None.
    """

    numbers_EGNK: Tensor
    scales_EGNS: Tensor | None = None
    bias_EGN: Tensor | None = None

    def words(self) -> tuple[int, ...]:
        """The struct `Matrices`."""
        w, scales, bias = self.numbers_EGNK, self.scales_EGNS, self.bias_EGN
        E, G, N, K = w.shape
        if w.dtype == torch.uint8:
            K *= 2
        size = w.element_size()
        of_expert, of_branch, of_row, _ = w.stride()
        return (
            w.data_ptr(),
            of_expert * size,
            of_branch * size,
            of_row * size,
            *_address(scales, 3),
            *_address(bias, 2),
            KINDS[w.dtype],
            0 if scales is None else KINDS[scales.dtype],
            0 if bias is None else KINDS[bias.dtype],
            0 if scales is None else K // scales.shape[3],
            G,
            N,
            K,
        )


def _address(t: Tensor | None, num_strides: int) -> tuple[int, ...]:
    """Address and first strides in bytes; zeros for None."""
    if t is None:
        return (0,) * (num_strides + 1)
    size = t.element_size()
    return t.data_ptr(), *(stride * size for stride in t.stride()[:num_strides])


_NUM_WORDS = 2 * 18 + 14
_Words = ctypes.c_int64 * _NUM_WORDS


class Kernels:
    """The kernels of one instruction set.

    Args:
        path: the shared object.
        has_tiles: whether BF16 shall go to tiles; the system must grant them.

    Attributes:
        has_tiles: whether it does.
    """

    def __init__(self, path: str, *, has_tiles: bool) -> None:
        loaded = ctypes.CDLL(path)
        self._experts = loaded.expertmesh_experts
        self._experts.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._experts.restype = ctypes.c_int
        self.has_tiles = bool(has_tiles and loaded.expertmesh_grants_tiles())

    def experts(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_in: Stored,
        w_out: Stored,
        *,
        inner: str,
        num_experts: int,
        slot_of_expert_E: Tensor | None = None,
        hidden_RH: Tensor | None = None,
        num_threads: int,
    ) -> tuple[Tensor, int, int]:
        """Compute y (T, D) of contiguous tensors, and the least and the largest id; y is undefined if one is out of range.

        Args:
            x_TD: (T, D) float32 or bfloat16.
            ids_TK: (T, K) int64 in [0, E]; E is no expert.
            weights_TK: (T, K) float32.
            w_in: (E, G, F, D).
            w_out: (E, 1, D, F).
            inner: name of the point-wise function, see `INNER`.
            num_experts: E.
            slot_of_expert_E: (E,) int64 index of each expert in the matrices; None: expert e is at index e.
            hidden_RH: (R, G * F) in x's dtype, into which the pre-activations of the R live rows are written; or None.
            num_threads: number of threads.

        Raises:
            MemoryError: there is no memory for the panels.
        """
        y_TD = torch.empty_like(x_TD)
        words = _Words(
            *w_in.words(),
            *w_out.words(),
            x_TD.data_ptr(),
            y_TD.data_ptr(),
            0 if hidden_RH is None else hidden_RH.data_ptr(),
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
            0 if slot_of_expert_E is None else slot_of_expert_E.data_ptr(),
            *ids_TK.shape,
            num_experts,
            KINDS[x_TD.dtype],
            INNER[inner],
            num_threads,
            0,
            0,
        )
        if self._experts(ctypes.addressof(words), self.has_tiles) == -2:
            raise MemoryError("no memory for the experts' rows")
        return y_TD, words[_NUM_WORDS - 2], words[_NUM_WORDS - 1]
