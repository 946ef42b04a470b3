"""Element-wise part of the experts on the CPU: activation and its gradient over blocks of rows that fit the cache.

Every pass is a vectorised, multi-threaded PyTorch kernel that writes into a buffer. A block goes through all passes
before the next one starts, so only the first read and the last write leave the cache. Arithmetic is FP32 (FP64 for
FP64) whatever the type of the rows, with one rounding at the end. `docs/log.md` lists what was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.ops.activation import (
    inner_name,
    num_branches,
    pointwise_backward,
    second_branch,
    second_branch_backward,
)
from expertmesh.ops.cpu import compiled_passes
from expertmesh.ops.cpu.compiled_passes import CompiledPasses
from expertmesh.ops.dtypes import accumulate_dtype

BLOCK_ELEMENTS = 262144
"""Elements of one buffer per thread (1 MiB in FP32); smaller blocks lose more to calls than they gain from the L2
cache."""

_aten = torch.ops.aten


@dataclass(frozen=True)
class GradientBlock:
    """Inputs and outputs of one block of rows in the backward; `up` is None for plain activations."""

    gate: Tensor  # pre-activations, the first branch (or the only one)
    up: Tensor | None  # the second branch
    grad: Tensor  # gradient of s * act before the product with s; overwritten
    out: Tensor  # receives s * act
    d_gate: Tensor  # receives the gradient of gate; may be gate itself, or the `product` scratch of a gated activation
    d_up: Tensor | None  # receives the gradient of up; may be up itself, or the `act` scratch


@dataclass(frozen=True)
class Passes:
    """Scratch memory for blocks of rows, and the passes over them."""

    activation: str  # name of the activation
    hidden_dim: int  # F
    block_rows: int
    # FP32 or FP64 buffers (block_rows, F); rows that are FP32 or FP64 themselves need fewer
    scratch: tuple[Tensor, ...]

    @staticmethod
    def allocate(activation: str, rows_RF: Tensor, *, backward: bool) -> "Passes":
        """Allocate scratch for blocks of rows like `rows_RF` (R, F): its dtype, its device and at most R rows."""
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
        num_rows = h_RH.shape[0]
        narrow = h_RH.dtype != s_R.dtype
        for gate, up, s, out in zip(
            *self._branches(h_RH),
            self._blocks(s_R[:, None]),
            self._blocks(out_RF[:num_rows]),
            strict=True,
        ):
            act = self._sized(self.scratch[0], gate) if narrow else out
            self._pointwise(act.copy_(gate) if narrow else gate, act)
            if up is not None:
                up = self._sized(self.scratch[1], up).copy_(up) if narrow else up
                act.mul_(second_branch(up, inner_name(self.activation)))
            act.mul_(s)
            if narrow:
                out.copy_(act)

    def backward(
        self,
        grad_WF: Tensor,  # (W, F) gradient of s * act(h) before the product with s, that is dO W_out; overwritten
        h_RH: Tensor,  # (R, G * F) pre-activations, of the same dtype
        rows_W: Tensor | None,  # (W,) int32 row of each place, in [0, R); None: all rows in order
        s_W: Tensor,  # (W,) routing weights, FP32 or FP64
        out_WF: Tensor,  # (W, F), receives s * act(h)
        d_h_WH: Tensor,  # (W, G * F), receives the gradient of h
    ) -> Tensor:
        """Write s * act(h) and the gradient of h, at places that refer to rows of h by index.

        Returns:
            The gradient of s, rowsum(grad * act(h)), (W,).
        """
        # every block reads its part of H before it writes, so dH may share H's memory
        h_WH = h_RH if rows_W is None else torch.index_select(h_RH, 0, rows_W, out=d_h_WH)
        d_s_W = torch.empty_like(s_W)
        gates, ups = self._branches(h_WH)
        d_gates, d_ups = self._branches(d_h_WH)
        grads, outs = self._blocks(grad_WF), self._blocks(out_WF)
        weights = zip(self._blocks(s_W[:, None]), self._blocks(d_s_W), strict=True)
        blocks = (GradientBlock(*views) for views in zip(gates, ups, grads, outs, d_gates, d_ups, strict=True))
        for block, (s, d_s) in zip(blocks, weights, strict=True):
            act, product, *rest = (self._sized(buffer, block.gate) for buffer in self.scratch)
            if h_WH.dtype == s_W.dtype:
                self._block_backward(block, s, d_s, act, product)
            else:
                wide = self._widened(block, act, product, *rest)
                self._block_backward(wide, s, d_s, act, product)
                block.out.copy_(wide.out)
                block.d_gate.copy_(wide.d_gate)
                if block.d_up is not None and wide.d_up is not None:
                    block.d_up.copy_(wide.d_up)
        return d_s_W

    def _block_backward(self, block: GradientBlock, s: Tensor, d_s: Tensor, act: Tensor, product: Tensor) -> None:
        grad, out = block.grad, block.out
        self._pointwise(block.gate, act)
        if block.up is None or block.d_up is None:
            torch.mul(grad, act, out=product)
            torch.sum(product, 1, out=d_s)
            torch.mul(act, s, out=out)
            grad.mul_(s)
        else:
            inner = inner_name(self.activation)
            up = second_branch(block.up, inner)
            torch.mul(act, up, out=out)
            torch.mul(grad, out, out=product)
            torch.sum(product, 1, out=d_s)
            out.mul_(s)
            grad.mul_(s)
            # up is read before d_up is written, because both may share memory
            grad, down = torch.mul(grad, up, out=product), grad
            down = second_branch_backward(down, block.up, inner)
            torch.mul(down, act, out=block.d_up)
        self._pointwise_backward(grad, block.gate, block.d_gate)

    @staticmethod
    def _widened(
        block: GradientBlock,
        act: Tensor,
        product: Tensor,
        gate: Tensor,
        up: Tensor,
        grad: Tensor,
        out: Tensor,
    ) -> GradientBlock:
        """Copy inputs into FP32 scratch; gradients of gate and up reuse scratch that is no longer needed."""
        gate.copy_(block.gate)
        grad.copy_(block.grad)
        if block.up is None:
            return GradientBlock(gate, None, grad, out, product, None)
        return GradientBlock(gate, up.copy_(block.up), grad, out, product, act)

    def _blocks(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,) if rows.shape[0] <= self.block_rows else rows.split(self.block_rows)

    def _branches(self, h_RH: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        if num_branches(self.activation) == 1:
            blocks = self._blocks(h_RH)
            return blocks, (None,) * len(blocks)
        return self._blocks(h_RH[:, : self.hidden_dim]), self._blocks(h_RH[:, self.hidden_dim :])

    @staticmethod
    def _sized(buffer: Tensor, like: Tensor) -> Tensor:
        return buffer if buffer.shape[0] == like.shape[0] else buffer[: like.shape[0]]

    def _pointwise(self, h: Tensor, out: Tensor) -> None:
        inner = inner_name(self.activation)
        if inner == "silu":
            _aten.silu.out(h, out=out)
        elif inner == "gelu":
            _aten.gelu.out(h, out=out)
        elif inner == "clamped_silu":
            small = torch.clamp(h, max=CLAMP_LIMIT)
            torch.sigmoid(small * CLAMP_SLOPE, out=out).mul_(small)
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
        elif inner == "clamped_silu":
            out.copy_(pointwise_backward(grad, h, inner))
        else:
            torch.clamp_min(h, 0, out=out)
            out.mul_(grad).mul_(2)


def passes_for(activation: str, rows_RF: Tensor, *, num_rows: int, backward: bool) -> Passes | CompiledPasses:
    """Make the passes of a call with num_rows rows in all; its parts have the dtype, the device and at most the rows of
    `rows_RF` (R, F)."""
    if compiled_passes.serves(activation, rows_RF, num_rows=num_rows, backward=backward):
        return CompiledPasses(activation)
    return Passes.allocate(activation, rows_RF, backward=backward)
