"""Products of rows with their experts' matrices and low-rank adapters on a CPU, the matrices' one expert at a time.

Nothing here is seen by autograd. Adapters are thin, so that the way to a product takes longer than the product. Those of neighbouring
experts, whose rows are neighbours too, are one product: all rows of a panel with all its adapters, of which each row keeps
its own expert's part and has zeros in the others'. A sum over the panel's rows then is one over each expert's own.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.ops.cpu.expert_rows import ExpertRows, rows_by_expert
from expertmesh.ops.cpu.products import gemm_rows, product_into, rows_times_weight

PANEL_ROWS = {"tiles": 512, "dots": 256, "none": 1}
"""Experts share a product of their adapters until they have so many rows, by the processor's instructions for the type: what is
multiplied by zeros costs little in AMX's tiles, more in AVX-512's dot products, and too much without either."""
MOST_EXPERTS = 8
"""And no more than so many."""


class Panel(NamedTuple):
    """Neighbouring experts and their rows.

    Attributes:
        blocks: those of its experts that have rows.
        rows: to multiply, as one block.
    """

    blocks: list[ExpertRows]
    rows: ExpertRows

    @property
    def experts(self) -> slice:
        """From the first to the last, those without rows between them included."""
        return slice(self.blocks[0].expert, self.blocks[-1].expert + 1)

    def parts(self, rank: int) -> Iterator[tuple[ExpertRows, slice, slice]]:
        """Each expert with its rows and its columns among those of the panel (size, G r)."""
        for block in self.blocks:
            first = rank * (block.expert - self.blocks[0].expert)
            rows = slice(block.start - self.rows.start, block.stop - self.rows.start)
            yield block, rows, slice(first, first + rank)

    def of_own(self, wide: Tensor, rank: int) -> Tensor:
        """Zeros, in place, where a row is not of the expert, whatever the product with the other's adapter is."""
        if len(self.blocks) > 1:
            for _, rows, own in self.parts(rank):
                wide[rows, : own.start].zero_()
                wide[rows, own.stop :].zero_()
            wide[self.rows.stop - self.rows.start :].zero_()
        return wide

    def widened(self, low_Rr: Tensor) -> Tensor:
        """Rows (R, r) of all, those of the panel in the places of their experts (size, G r)."""
        if len(self.blocks) == 1:
            return self.rows.alone(low_Rr)
        rank, experts = low_Rr.shape[1], self.experts
        wide = low_Rr.new_zeros(self.rows.size, rank * (experts.stop - experts.start))
        for block, rows, own in self.parts(rank):
            wide[rows, own] = low_Rr[block.start : block.stop]
        return wide

    def narrowed(self, wide: Tensor, low_Rr: Tensor) -> None:
        """The other way round: write the panel's rows."""
        for block, rows, own in self.parts(low_Rr.shape[1]):
            low_Rr[block.start : block.stop] = wide[rows, own]

    def each(self, values: Tensor, live: int) -> Tensor:
        """The rows to multiply: behind those of several experts the next panel's, but zeros for what is not live."""
        end = self.rows.start + self.rows.size
        shares = len(self.blocks) > 1 and end <= live
        return values[self.rows.start : end] if shares else self.rows.alone(values)

    def add_product(self, wide: Tensor, factors: Tensor, values: Tensor) -> None:
        """Add to the panel's rows (R, ...); what comes behind them is written later."""
        end = self.rows.start + self.rows.size
        count = self.rows.size if end <= len(values) else self.rows.stop - self.rows.start
        into = values[self.rows.start : self.rows.start + count]
        product_into(wide[:count], factors, into, add=True)


def panels(bounds: list[int], w_ENK: Tensor, dtype: torch.dtype, most_rows: int) -> Iterator[Panel]:
    """All experts that have rows, in their order; those of a panel have no more rows together, but for a single one."""
    gathered: list[ExpertRows] = []
    for block in rows_by_expert(bounds, w_ENK, dtype):
        if gathered and (
            len(gathered) == MOST_EXPERTS or block.stop - gathered[0].start > most_rows
        ):
            yield _panel(gathered, w_ENK, dtype)
            gathered = []
        gathered.append(block)
    if gathered:
        yield _panel(gathered, w_ENK, dtype)


def _panel(gathered: list[ExpertRows], w_ENK: Tensor, dtype: torch.dtype) -> Panel:
    if len(gathered) == 1:
        return Panel(gathered, gathered[0])
    (first, start, *_), (_, _, stop, _) = gathered[0], gathered[-1]
    size = gemm_rows(stop - start, w_ENK.device, dtype)
    return Panel(gathered, ExpertRows(first, start, stop, size))


def instructions_for(dtype: torch.dtype) -> str:
    """What this processor multiplies rows of a 16-bit type with: "tiles", "dots" or "none"; other types have "none"."""
    if dtype == torch.float16:
        return "tiles" if torch.cpu._is_amx_fp16_supported() else "none"
    if dtype != torch.bfloat16:
        return "none"
    if torch.cpu._is_amx_tile_supported():
        return "tiles"
    return "dots" if torch.cpu._is_avx512_bf16_supported() else "none"


def _rows_together(a_ErK: Tensor, b_ErN: Tensor) -> int:
    """Of a panel: zeros times what is not finite are not zero, so that each expert is for itself then."""
    most_rows = PANEL_ROWS[instructions_for(a_ErK.dtype)]
    return most_rows if most_rows == 1 or _are_finite(a_ErK, b_ErN) else 1


def _are_finite(*values: Tensor) -> bool:
    """By their sums, which take a tenth of the time of `isfinite`."""
    return all(bool(t.sum(dtype=torch.float32).isfinite()) for t in values)


def forward(
    x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, a_ErK: Tensor, b_ENr: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Give y (R, N) = x W^T + s (x A^T) B^T and s x A^T (R, r); zeros behind the last live row.

    All of one type, whose products this CPU has.
    """
    bounds, r = offsets_E.tolist(), a_ErK.shape[1]
    a_ErK, b_ErN = a_ErK.contiguous(), b_ENr.mT.contiguous()  # once, and not in each product
    y_RN = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1])
    low_Rr = x_RK.new_empty(x_RK.shape[0], r)
    for panel in panels(bounds, w_ENK, x_RK.dtype, _rows_together(a_ErK, b_ErN)):
        for block in panel.blocks:
            y = block.room(y_RN)
            rows_times_weight(block.each(x_RK), w_ENK[block.expert], y)
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
    """Give the gradients of x (R, K), a (E, r, K) and b (E, N, r); that of x is empty where nobody needs it."""
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
        # a row that is not finite, times the zeros of another expert
        call = grad_RN, x_RK, low_Rr, w_ENK, offsets_E, a_ErK, b_ENr, scaling, needs_x
        return backward(*call, most_rows=1)
    if needs_x:
        d_x[bounds[-1] :].zero_()
    return d_x, d_a, d_b
