"""Products of rows with their experts' matrices and low-rank adapters on a CPU, the matrices' one expert at a time.

Nothing here is seen by autograd. Adapters are thin, so that the way to a product takes longer than the product. Those of neighbouring
experts, whose rows are neighbours too, are one product: all rows of a panel with all its adapters, of which each row keeps
its own expert's part and has zeros in the others'. A sum over the panel's rows then is one over each expert's own.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.ops.cpu.blocks import Block, blocks
from expertmesh.ops.cpu.forward import rows_times_weight
from expertmesh.ops.cpu.products import gemm_rows, product_into

PANEL_ROWS = {torch.bfloat16: 512, torch.float16: 512}
"""Experts share a product of their adapters until they have so many rows; those of other types have their own."""
MOST_EXPERTS = 8
"""And no more than so many."""


class Panel(NamedTuple):
    """Neighbouring experts and their rows.

    Attributes:
        blocks: those of its experts that have rows.
        first: its first expert.
        last: the one behind its last.
        rows: to multiply, as one block.
        own: (size, G, 1) whether a row is of each of its experts; None: there is one.
    """

    blocks: list[Block]
    first: int
    last: int
    rows: Block
    own: Tensor | None

    def of_own(self, wide: Tensor) -> Tensor:
        """Zeros where a row (size, G r) is not of the expert, whatever the product with the other's adapter is."""
        if self.own is None:
            return wide
        return torch.where(self.own, wide.view(*self.own.shape[:2], -1), 0.0).flatten(1)

    def widened(self, low_nr: Tensor) -> Tensor:
        """Rows (size, r) in the places of their experts (size, G r)."""
        return low_nr if self.own is None else self.of_own(low_nr.repeat(1, self.own.shape[1]))

    def narrowed(self, wide: Tensor) -> Tensor:
        """The other way round."""
        return wide if self.own is None else wide.view(*self.own.shape[:2], -1).sum(1)

    def each(self, values: Tensor, live: int) -> Tensor:
        """The rows to multiply: behind those of several experts the next panel's, but zeros for what is not live."""
        end = self.rows.start + self.rows.size
        shares = self.own is not None and end <= live
        return values[self.rows.start : end] if shares else self.rows.alone(values)

    def add_product(self, wide: Tensor, factors: Tensor, values: Tensor) -> None:
        """Add to the panel's rows (R, ...); what comes behind them is written later."""
        end = self.rows.start + self.rows.size
        count = self.rows.size if end <= len(values) else self.rows.stop - self.rows.start
        into = values[self.rows.start : self.rows.start + count]
        product_into(wide[:count], factors, into, add=True)


def panels(bounds: list[int], w_ENK: Tensor, dtype: torch.dtype, most_rows: int) -> Iterator[Panel]:
    """All experts that have rows, in their order; those of a panel have no more rows together, but for a single one."""
    gathered: list[Block] = []
    for block in blocks(bounds, w_ENK, dtype):
        if gathered and (
            len(gathered) == MOST_EXPERTS or block.stop - gathered[0].start > most_rows
        ):
            yield _panel(gathered, w_ENK, dtype)
            gathered = []
        gathered.append(block)
    if gathered:
        yield _panel(gathered, w_ENK, dtype)


def _panel(gathered: list[Block], w_ENK: Tensor, dtype: torch.dtype) -> Panel:
    (first, start, _, size), (*_, stop, _) = gathered[0], gathered[-1]
    last = gathered[-1].expert + 1
    if len(gathered) == 1:
        return Panel(gathered, first, last, gathered[0], None)
    size = gemm_rows(stop - start, w_ENK.device, dtype)
    own = torch.zeros(size, last - first, 1, dtype=torch.bool)
    for block in gathered:
        own[block.start - start : block.stop - start, block.expert - first] = True
    return Panel(gathered, first, last, Block(first, start, stop, size), own)


def forward(
    x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, a_ErK: Tensor, b_ENr: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Give y (R, N) = x W^T + s (x A^T) B^T and s x A^T (R, r); zeros behind the last live row.

    All of one type, whose products this CPU has.
    """
    bounds, r = offsets_E.tolist(), a_ErK.shape[1]
    a_ErK, b_ENr = a_ErK.contiguous(), b_ENr.contiguous()  # once, and not in each product
    y_RN = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1])
    low_Rr = x_RK.new_empty(x_RK.shape[0], r)
    most_rows = PANEL_ROWS.get(x_RK.dtype, 1)
    for panel in panels(bounds, w_ENK, x_RK.dtype, most_rows):
        for block in panel.blocks:
            y = block.room(y_RN)
            rows_times_weight(block.each(x_RK), w_ENK[block.expert], y)
            block.keep(y, y_RN)
        experts, rows = slice(panel.first, panel.last), panel.rows
        x = panel.each(x_RK, bounds[-1])
        wide = x.new_empty(rows.size, (panel.last - panel.first) * r)
        product_into(x, a_ErK[experts].flatten(0, 1).T, wide)
        wide = panel.of_own(wide.mul_(scaling))
        low_Rr[rows.start : rows.stop] = panel.narrowed(wide)[: rows.stop - rows.start]
        panel.add_product(wide, b_ENr[experts].mT.flatten(0, 1), y_RN)
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
    bounds = offsets_E.tolist()
    most_rows = PANEL_ROWS.get(x_RK.dtype, 1) if most_rows is None else most_rows
    d_x = x_RK.new_empty(x_RK.shape if needs_x else 0)
    a_ErK, b_ENr = a_ErK.contiguous(), b_ENr.contiguous()
    d_a, d_b = x_RK.new_zeros(a_ErK.shape), x_RK.new_zeros(b_ENr.shape)
    for panel in panels(bounds, w_ENK, x_RK.dtype, most_rows):
        experts = slice(panel.first, panel.last)
        grad, x, low = (panel.each(t, bounds[-1]) for t in (grad_RN, x_RK, low_Rr))
        low = panel.widened(low)
        d_low = torch.empty_like(low)
        product_into(grad, b_ENr[experts].mT.flatten(0, 1).T, d_low)
        d_low = panel.of_own(d_low.mul_(scaling))
        product_into(d_low.T, x, d_a[experts].flatten(0, 1))
        if panel.own is None:
            product_into(grad.T, low, d_b[panel.first])
        else:
            together = grad.new_empty(low.shape[1], grad.shape[1])
            product_into(low.T, grad, together)
            d_b[experts] = together.unflatten(0, (-1, d_b.shape[2])).mT
        if needs_x:
            for block in panel.blocks:
                dx = block.room(d_x)
                product_into(block.each(grad_RN), w_ENK[block.expert], dx)
                block.keep(dx, d_x)
            panel.add_product(d_low, a_ErK[experts].flatten(0, 1), d_x)
    if most_rows > 1 and not (d_a.isfinite().all() and d_b.isfinite().all()):
        # a row that is not finite, times the zeros of another expert
        call = grad_RN, x_RK, low_Rr, w_ENK, offsets_E, a_ErK, b_ENr, scaling, needs_x
        return backward(*call, most_rows=1)
    if needs_x:
        d_x[bounds[-1] :].zero_()
    return d_x, d_a, d_b
