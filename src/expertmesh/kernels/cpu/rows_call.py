"""A call of the operations along rows in C: the struct that `rows.c` declares."""

import ctypes
from typing import Literal

import torch
from torch import Tensor

KINDS_OF_ROWS = {torch.float32: 0, torch.bfloat16: 1}
"""Types of rows and weights as `vectors.h` numbers them."""
Operation = Literal["rms_norm", "softmax", "sum"]
OPERATIONS: dict[Operation, int] = {"rms_norm": 0, "softmax": 1, "sum": 2}
"""Operations as `rows.c` numbers them."""

_POINTERS = ("x", "y", "weight", "cos", "sin")
_SIZES = (
    *("operation", "kind", "weight_kind", "tokens", "outer", "inner", "width"),
    *("of_token", "of_outer", "of_inner", "positions", "num_threads"),
)


class RowsCall(ctypes.Structure):
    """Arguments of a call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("eps", ctypes.c_double),
    )

    @classmethod
    def of(
        cls,
        operation: Operation,  # "softmax" and "sum" are of float32
        x_TXYN: Tensor,  # (T, X, Y, N) float32 or bfloat16; numbers of a row are adjacent
        y: Tensor,  # (T, X, Y, N) of x's type, or (T, X, Y) sums, contiguous; the result
        *,
        weight: Tensor | None = None,  # (N,) contiguous float32 or bfloat16; None: no norm
        eps: float = 0.0,  # added to the mean square
        cos: Tensor | None = None,  # (P, N / 2) contiguous float32; token t is turned by row t mod P; None: no rotation
        sin: Tensor | None = None,  # of the shape of cos
    ) -> "RowsCall":
        """A call; the tensors must live until it has returned."""
        size = x_TXYN.element_size()
        of_token, of_outer, of_inner, _ = x_TXYN.stride()
        return cls(
            x_TXYN.data_ptr(),
            y.data_ptr(),
            *(None if t is None else t.data_ptr() for t in (weight, cos, sin)),
            OPERATIONS[operation],
            KINDS_OF_ROWS[x_TXYN.dtype],
            0 if weight is None else KINDS_OF_ROWS[weight.dtype],
            *x_TXYN.shape,
            of_token * size,
            of_outer * size,
            of_inner * size,
            1 if cos is None else cos.shape[0],
            1,
            eps,
        )
