"""The element-wise half of the experts on the CPU: activation and its gradient over blocks of rows that fit the cache.

Every pass is one of PyTorch's vectorised, multi-threaded kernels writing into a buffer; a block goes through all
passes before the next one starts, so only the first read and the last write leave the cache. Arithmetic is FP32
(FP64 for FP64) whatever the type of the rows, with one rounding at the end. `docs/log.md` has what was tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name, num_branches
from expertmesh.ops.reference import accumulate_dtype

BLOCK_ELEMENTS = 131072
"""Elements of one buffer per thread (512 KiB in FP32): smaller blocks lose more to calls than the L2 cache gives."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class Passes:
    """Scratch memory for blocks of rows, and the passes over them.

    Attributes:
        activation: name of the activation.
        hidden_dim: F.
        block_rows: rows per block.
        scratch: FP32 or FP64 buffers (block_rows, F); the first of them are enough where rows are as wide already.
    """

    activation: str
    hidden_dim: int
    block_rows: int
    scratch: tuple[Tensor, ...]

    @staticmethod
    def allocate(activation: str, rows_RF: Tensor, *, backward: bool) -> "Passes":
        """Allocate scratch for blocks of rows like these (R, F): their type, device and at most their number."""
        num_rows, hidden_dim = rows_RF.shape
        wide = accumulate_dtype(rows_RF.dtype)
        per_block = BLOCK_ELEMENTS * torch.get_num_threads() // max(hidden_dim, 1)
        block_rows = max(1, min(per_block, num_rows))
        narrow = rows_RF.dtype != wide
        count = (6 if narrow else 2) if backward else (2 if narrow else 0)
        shape = (block_rows, hidden_dim)
        scratch = tuple(rows_RF.new_empty(shape, dtype=wide) for _ in range(count))
        return Passes(activation, hidden_dim, block_rows, scratch)

    def forward(self, h_RH: Tensor, s_R: Tensor, out_RF: Tensor) -> None:
        """Write s * act(h) into the first rows of out; h (R, G * F), s (R,) FP32 or FP64, out of h's type."""
        for rows in self._blocks(h_RH.shape[0]):
            h, s, out = h_RH[rows], s_R[rows, None], out_RF[rows]
            gate, up = self._branches(h)
            if h.dtype == s.dtype:
                self._pointwise(gate, out)
                if up is not None:
                    out.mul_(up)
                out.mul_(s)
                continue
            act, other = (buffer[: len(h)] for buffer in self.scratch)
            act.copy_(gate)
            self._pointwise(act, act)
            if up is not None:
                act.mul_(other.copy_(up))
            out.copy_(act.mul_(s))

    def backward(
        self,
        grad_RF: Tensor,
        h_RH: Tensor,
        s_R: Tensor,
        out_RF: Tensor,
        d_h_RH: Tensor,
        d_s_R: Tensor,
    ) -> None:
        """Write s * act(h), the gradient of h and that of s, rowsum(grad * act(h)).

        Args:
            grad_RF: (R or more, F) gradient of s * act(h) before the product with s, that is dO W_out; overwritten.
            h_RH: (R, G * F) pre-activations.
            s_R: (R,) routing weights, FP32 or FP64.
            out_RF: (R or more, F), receives s * act(h).
            d_h_RH: (R or more, G * F), receives the gradient of h.
            d_s_R: (R,), receives the gradient of s.
        """
        for rows in self._blocks(h_RH.shape[0]):
            h, s, d_h = h_RH[rows], s_R[rows, None], d_h_RH[rows]
            gate, up = self._branches(h)
            d_gate, d_up = self._branches(d_h)
            grad, out = grad_RF[rows], out_RF[rows]
            act, product, *rest = (buffer[: len(h)] for buffer in self.scratch)
            if h.dtype == s.dtype:
                self._block_backward(
                    grad, gate, up, s, act, product, out, d_gate, d_up, d_s_R[rows]
                )
                continue
            wide_gate, wide_up, wide_grad, wide_out = rest
            wide_grad.copy_(grad)
            wide_gate.copy_(gate)
            if up is None or d_up is None:
                self._block_backward(
                    wide_grad,
                    wide_gate,
                    None,
                    s,
                    act,
                    product,
                    wide_out,
                    wide_up,
                    None,
                    d_s_R[rows],
                )
                d_gate.copy_(wide_up)
            else:
                wide_up.copy_(up)
                # the gradients of gate and up may take the places of product and act, which are read first
                self._block_backward(
                    wide_grad,
                    wide_gate,
                    wide_up,
                    s,
                    act,
                    product,
                    wide_out,
                    product,
                    act,
                    d_s_R[rows],
                )
                d_gate.copy_(product)
                d_up.copy_(act)
            out.copy_(wide_out)

    def _block_backward(
        self,
        grad: Tensor,
        gate: Tensor,
        up: Tensor | None,
        s: Tensor,
        act: Tensor,
        product: Tensor,
        out: Tensor,
        d_gate: Tensor,
        d_up: Tensor | None,
        d_s: Tensor,
    ) -> None:
        self._pointwise(gate, act)
        if up is None or d_up is None:
            torch.mul(grad, act, out=product)
            torch.sum(product, 1, out=d_s)
            torch.mul(act, s, out=out)
            grad.mul_(s)
        else:
            torch.mul(act, up, out=out)
            torch.mul(grad, out, out=product)
            torch.sum(product, 1, out=d_s)
            out.mul_(s)
            grad.mul_(s)
            torch.mul(grad, act, out=d_up)
            grad.mul_(up)
        self._pointwise_backward(grad, gate, d_gate)

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.block_rows):
            yield slice(start, min(start + self.block_rows, num_rows))

    def _branches(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        if num_branches(self.activation) == 1:
            return h, None
        return h[:, : self.hidden_dim], h[:, self.hidden_dim :]

    def _pointwise(self, h: Tensor, out: Tensor) -> None:
        inner = inner_name(self.activation)
        if inner == "silu":
            _aten.silu.out(h, out=out)
        elif inner == "gelu":
            _aten.gelu.out(h, out=out)
        else:
            torch.clamp_min(h, 0, out=out)
            if inner == "relu2":
                out.mul_(out)

    def _pointwise_backward(self, grad: Tensor, h: Tensor, out: Tensor) -> None:
        inner = inner_name(self.activation)
        if inner == "silu":
            _aten.silu_backward.grad_input(grad, h, grad_input=out)
        elif inner == "gelu":
            _aten.gelu_backward.grad_input(grad, h, grad_input=out)
        elif inner == "relu":
            _aten.threshold_backward.grad_input(grad, h, 0, grad_input=out)
        else:
            torch.clamp_min(h, 0, out=out)
            out.mul_(grad).mul_(2)
