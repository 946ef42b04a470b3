"""Products of sorted rows with their experts' matrices and low-rank adapters on a CPU.

Nothing here is seen by autograd. Matrices are multiplied one expert at a time. Adapters are thin, so a call costs more
than their product. Neighbouring experts therefore form a panel: all its rows are multiplied by all its adapters in one
product, and each row keeps its own expert's columns and has zeros in the others. Sums over the panel's rows then are
sums over each expert's own rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.ops.cpu.expert_rows import ExpertRows, rows_by_expert
from expertmesh.ops.cpu.products import gemm_rows, product_into

PANEL_ROWS = {"tiles": 512, "dots": 256, "none": 1}
"""Maximum number of rows of a panel, by the processor's instructions for the dtype. Multiplying by zeros costs little
in AMX's tiles, more in AVX-512's dot products, and too much without either.
"""
MOST_EXPERTS = 8
"""Maximum number of experts of a panel."""


class Panel(NamedTuple):
    """Panel of neighbouring experts that share products of their adapters."""

    blocks: list[ExpertRows]
    rows: ExpertRows  # all rows of the panel, as one block

    @property
    def experts(self) -> slice:
        """Range of experts from the first to the last, including experts without rows."""
        return slice(self.blocks[0].expert, self.blocks[-1].expert + 1)

    def parts(self, rank: int) -> Iterator[tuple[ExpertRows, slice, slice]]:
        """Each expert's rows in the panel, and its columns in the panel's wide tensor (size, G r)."""
        for block in self.blocks:
            first = rank * (block.expert - self.blocks[0].expert)
            rows = slice(block.start - self.rows.start, block.stop - self.rows.start)
            yield block, rows, slice(first, first + rank)

    def of_own(self, wide: Tensor, rank: int) -> Tensor:
        """Zero each row's columns of other experts, in place; these products may be non-finite."""
        if len(self.blocks) > 1:
            for _, rows, own in self.parts(rank):
                wide[rows, : own.start].zero_()
                wide[rows, own.stop :].zero_()
            wide[self.rows.stop - self.rows.start :].zero_()
        return wide

    def widened(self, low_Rr: Tensor) -> Tensor:
        """Expand rows (R, r) to the panel's wide tensor (size, G r), with each row in its expert's columns."""
        if len(self.blocks) == 1:
            return self.rows.alone(low_Rr)
        rank, experts = low_Rr.shape[1], self.experts
        wide = low_Rr.new_zeros(self.rows.size, rank * (experts.stop - experts.start))
        for block, rows, own in self.parts(rank):
            wide[rows, own] = low_Rr[block.start : block.stop]
        return wide

    def narrowed(self, wide: Tensor, low_Rr: Tensor) -> None:
        """Write the panel's wide tensor back to rows (R, r); the inverse of `widened`."""
        for block, rows, own in self.parts(low_Rr.shape[1]):
            low_Rr[block.start : block.stop] = wide[rows, own]

    def each(self, values: Tensor, live: int) -> Tensor:
        """Rows to multiply if each has its own result: padding may be rows of the next panel, but not rows behind the
        last live one."""
        end = self.rows.start + self.rows.size
        shares = len(self.blocks) > 1 and end <= live
        return values[self.rows.start : end] if shares else self.rows.alone(values)

    def add_product(self, wide: Tensor, factors: Tensor, values: Tensor) -> None:
        """Add a product to the panel's rows (R, ...); padding writes into rows that a later panel overwrites."""
        end = self.rows.start + self.rows.size
        count = self.rows.size if end <= len(values) else self.rows.stop - self.rows.start
        into = values[self.rows.start : self.rows.start + count]
        product_into(wide[:count], factors, into, add=True)


def panels(bounds: list[int], w_ENK: Tensor, dtype: torch.dtype, most_rows: int) -> Iterator[Panel]:
    """Panels of all experts that have rows, in order; a panel of several experts has at most `most_rows` rows."""
    gathered: list[ExpertRows] = []
    for block in rows_by_expert(bounds, w_ENK, dtype, is_coarse=True):
        if gathered and (len(gathered) == MOST_EXPERTS or block.stop - gathered[0].start > most_rows):
            yield _panel(gathered, w_ENK, dtype)
            gathered = []
        gathered.append(block)
    if gathered:
        yield _panel(gathered, w_ENK, dtype)


def _panel(gathered: list[ExpertRows], w_ENK: Tensor, dtype: torch.dtype) -> Panel:
    if len(gathered) == 1:
        return Panel(gathered, gathered[0])
    (first, start, *_), (_, _, stop, _) = gathered[0], gathered[-1]
    size = gemm_rows(stop - start, w_ENK.device, dtype, is_coarse=True)
    return Panel(gathered, ExpertRows(first, start, stop, size))


def instructions_for(dtype: torch.dtype) -> str:
    """Product instructions of this processor for a 16-bit dtype: "tiles" (AMX), "dots" (AVX-512) or "none"; "none" for
    other dtypes."""
    if dtype == torch.float16:
        return "tiles" if torch.cpu._is_amx_fp16_supported() else "none"
    if dtype != torch.bfloat16:
        return "none"
    if torch.cpu._is_amx_tile_supported():
        return "tiles"
    return "dots" if torch.cpu._is_avx512_bf16_supported() else "none"


def _rows_together(a_ErK: Tensor, b_ErN: Tensor) -> int:
    """Maximum number of rows of a panel; 1 (no sharing) if a factor is not finite, because zero times inf is NaN."""
    most_rows = PANEL_ROWS[instructions_for(a_ErK.dtype)]
    return most_rows if most_rows == 1 or _are_finite(a_ErK, b_ErN) else 1


def _are_finite(*values: Tensor) -> bool:
    """Whether all values are finite, by their sums, which take a tenth of the time of `isfinite`."""
    return all(bool(t.sum(dtype=torch.float32).isfinite()) for t in values)


def forward(
    x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, a_ErK: Tensor, b_ENr: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute y (R, N) = x W^T + s (x A^T) B^T and s x A^T (R, r), with zeros behind the last live row.

    All tensors have one dtype, for which this CPU has product instructions.
    """
    bounds, r = offsets_E.tolist(), a_ErK.shape[1]
    a_ErK, b_ErN = a_ErK.contiguous(), b_ENr.mT.contiguous()  # once, not in each product
    y_RN = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1])
    low_Rr = x_RK.new_empty(x_RK.shape[0], r)
    for panel in panels(bounds, w_ENK, x_RK.dtype, _rows_together(a_ErK, b_ErN)):
        for block in panel.blocks:
            y = block.room(y_RN)
            product_into(block.each(x_RK), w_ENK[block.expert].T, y)
            block.keep(y, y_RN)
        a, b = a_ErK[panel.experts].flatten(0, 1), b_ErN[panel.experts].flatten(0, 1)
        wide = x_RK.new_empty(panel.rows.size, len(a))
        product_into(panel.each(x_RK, bounds[-1]), a.T, wide)
        wide = panel.of_own(wide.mul_(scaling), r)
        panel.narrowed(wide, low_Rr)
        panel.add_product(wide, b, y_RN)
    y_RN[bounds[-1] :].zero_()
    low_Rr[bounds[-1] :].zero_()
    return y_RN, low_Rr


def backward(
    grad_RN: Tensor,
    x_RK: Tensor,
    low_Rr: Tensor,
    w_ENK: Tensor,
    offsets_E: Tensor,
    a_ErK: Tensor,
    b_ENr: Tensor,
    scaling: float,
    needs_x: bool,
    most_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x (R, K), a (E, r, K) and b (E, N, r); the gradient of x is empty unless `needs_x`."""
    bounds, r = offsets_E.tolist(), a_ErK.shape[1]
    d_x = x_RK.new_empty(x_RK.shape if needs_x else 0)
    a_ErK, b_ErN = a_ErK.contiguous(), b_ENr.mT.contiguous()
    d_a, d_b = x_RK.new_zeros(a_ErK.shape), x_RK.new_zeros(b_ENr.shape)
    most_rows = _rows_together(a_ErK, b_ErN) if most_rows is None else most_rows
    for panel in panels(bounds, w_ENK, x_RK.dtype, most_rows):
        a, b = a_ErK[panel.experts].flatten(0, 1), b_ErN[panel.experts].flatten(0, 1)
        grad, x = panel.each(grad_RN, bounds[-1]), panel.each(x_RK, bounds[-1])
        low = panel.widened(low_Rr)
        d_low = torch.empty_like(low)
        product_into(grad, b.T, d_low)
        d_low = panel.of_own(d_low.mul_(scaling), r)
        product_into(d_low.T, x, d_a[panel.experts].flatten(0, 1))
        if len(panel.blocks) == 1:
            product_into(grad.T, low, d_b[panel.blocks[0].expert])
        else:
            together = grad.new_empty(low.shape[1], grad.shape[1])
            product_into(low.T, grad, together)
            d_b[panel.experts] = together.unflatten(0, (-1, r)).mT
        if needs_x:
            for block in panel.blocks:
                dx = block.room(d_x)
                product_into(block.each(grad_RN), w_ENK[block.expert], dx)
                block.keep(dx, d_x)
            panel.add_product(d_low, a, d_x)
    if most_rows > 1 and not _are_finite(d_a, d_b):
        # a non-finite row was multiplied by another expert's zeros: again without sharing
        call = grad_RN, x_RK, low_Rr, w_ENK, offsets_E, a_ErK, b_ENr, scaling, needs_x
        return backward(*call, most_rows=1)
    if needs_x:
        d_x[bounds[-1] :].zero_()
    return d_x, d_a, d_b
