"""The "torch" backend of `moe_mlp`, forward: one GEMM per expert and step over its block of sorted rows.

Buffers are reused from expert to expert so that they stay in the cache, results are written where they belong
(H), and nothing is copied but the gathered tokens. Nothing here is seen by autograd. The backward is in
`expert_loop_backward.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.activation_passes import Passes
from expertmesh.ops.backend import gemm_dtype, gemm_rows
from expertmesh.ops.permute import sum_rows
from expertmesh.ops.reference import accumulate_dtype

FEW_ELEMENTS = 1 << 20
"""Up to this many elements of H, all rows go through each step together: what decoding needs."""


@dataclass(frozen=True)
class Experts:
    """The weights of all experts and their activation, as `moe_mlp` takes them."""

    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    activation: str

    def w_in(self, e: int, dtype: torch.dtype) -> Tensor:
        """First weight of one expert as (G * F, D)."""
        w = self.w_in_EGFD[e].flatten(0, 1)
        return w if w.dtype == dtype else w.to(dtype)

    def w_out(self, e: int, dtype: torch.dtype) -> Tensor:
        """Second weight of one expert, (D, F)."""
        w = self.w_out_EDF[e]
        return w if w.dtype == dtype else w.to(dtype)

    def hidden(self, e: int, x_RD: Tensor, out_RH: Tensor) -> None:
        """Write the pre-activations of rows of one expert, all three in the type of the products."""
        w_in = self.w_in(e, x_RD.dtype).T
        if self.b_in_EGF is None:
            torch.mm(x_RD, w_in, out=out_RH)
        else:
            # inside the product, so that the sum is rounded once: a second rounding moves H across the kink of ReLU
            bias = self.b_in_EGF[e].flatten().to(x_RD.dtype)
            torch.addmm(bias, x_RD, w_in, out=out_RH)


@dataclass(frozen=True)
class Maps:
    """The tensors of `RouteMetadata`."""

    offsets_E: Tensor
    token_of_row_N: Tensor
    slot_of_row_N: Tensor
    row_of_slot_N: Tensor


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w_in: bool
    w_out: bool
    weights: bool
    b_in: bool
    b_out: bool


@dataclass(frozen=True)
class HiddenGradients:
    """What `weight_grads` needs of `data_grads`; its layout is the backend's own.

    Attributes:
        a_RF: s * act(H), or None where no gradient of w_out is wanted.
        d_h_RH: gradient of H, or None where nothing before H has a gradient.
    """

    a_RF: Tensor | None
    d_h_RH: Tensor | None


def forward(
    x_TD: Tensor, experts: Experts, weights_TK: Tensor, maps: Maps, *, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Give (y (T, D), H (R, G * F)); H is empty unless save_h. Synchronises with a GPU to read the offsets."""
    _, G, F, D = experts.w_in_EGFD.shape
    num_rows = maps.token_of_row_N.shape[0]
    bounds = maps.offsets_E.tolist()
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    most, pad = largest_block(bounds, x_TD.device, dtype)
    h_all = x_TD.new_empty(num_rows if save_h else 0, G * F)
    if pad == 0 and bounds[-1] * G * F <= FEW_ELEMENTS:
        return _forward_of_few(x_TD, experts, weights_TK, maps, bounds, h_all), h_all
    y_RD = x_TD.new_empty(bounds[-1] + pad, D, dtype=dtype)
    x_buffer = x_TD.new_empty(most, D)
    h_buffer = x_TD.new_empty(most, G * F, dtype=dtype)
    a_buffer = x_TD.new_empty(most, F, dtype=dtype)
    s_R = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
    passes = Passes.allocate(experts.activation, a_buffer, backward=False)
    for e, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            continue
        n = stop - start
        m = gemm_rows(n, x_TD.device, dtype)
        x = gather_tokens(x_TD, maps.token_of_row_N[start:stop], x_buffer[:m], dtype)
        # padding rows land on those of the next experts, which are written later, but never behind the last one
        direct = save_h and dtype == x_TD.dtype and start + m <= num_rows
        h = h_all[start : start + m] if direct else h_buffer[:m]
        experts.hidden(e, x, h)
        if save_h and not direct:
            h_all[start:stop].copy_(h[:n])
        passes.forward(h[:n], s_R[start:stop], a_buffer)
        torch.mm(a_buffer[:m], experts.w_out(e, dtype).T, out=y_RD[start : start + m])
        if experts.b_out_ED is not None:
            y_RD[start:stop].add_(s_R[start:stop, None] * experts.b_out_ED[e])
    y_TD = sum_rows(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return y_TD.to(x_TD.dtype), h_all


def _forward_of_few(
    x_TD: Tensor, experts: Experts, weights_TK: Tensor, maps: Maps, bounds: list[int], h_all: Tensor
) -> Tensor:
    """The same for so few rows (decoding) that all of H stays in the cache: fewer, larger calls."""
    _, G, F, D = experts.w_in_EGFD.shape
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    num_rows = bounds[-1]
    if num_rows == 0:
        return torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    counts = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    live = [e for e, count in enumerate(counts) if count]
    sizes = [counts[e] for e in live]
    x_RD = x_TD.index_select(0, maps.token_of_row_N[:num_rows]).to(dtype)
    direct = dtype == x_TD.dtype and bool(h_all.numel())
    h_RH = h_all[:num_rows] if direct else x_TD.new_empty(num_rows, G * F, dtype=dtype)
    for e, x, h in zip(live, x_RD.split(sizes), h_RH.split(sizes), strict=True):
        experts.hidden(e, x, h)
    if h_all.numel() and not direct:
        h_all[:num_rows].copy_(h_RH)
    s_R = row_weights(weights_TK, maps, num_rows, x_TD.dtype)
    a_RF, y_RD = (x_TD.new_empty(num_rows, width, dtype=dtype) for width in (F, D))
    Passes.allocate(experts.activation, a_RF, backward=False).forward(h_RH, s_R, a_RF)
    for e, a, y in zip(live, a_RF.split(sizes), y_RD.split(sizes), strict=True):
        torch.mm(a, experts.w_out(e, dtype).T, out=y)
    if experts.b_out_ED is not None:
        rows = torch.tensor(sizes, device=x_TD.device)
        expert_R = torch.tensor(live, device=x_TD.device).repeat_interleave(rows)
        y_RD.add_(s_R[:, None] * experts.b_out_ED[expert_R])
    y_TD = sum_rows(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return y_TD.to(x_TD.dtype)


def largest_block(bounds: list[int], device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of the largest padded block, and the largest padding."""
    counts = {stop - start for start, stop in zip(bounds, bounds[1:], strict=False)}
    padded = [(gemm_rows(n, device, dtype), n) for n in counts]
    return max((m for m, _ in padded), default=0), max((m - n for m, n in padded), default=0)


def gather_tokens(
    source_TD: Tensor, tokens_R: Tensor, out_RD: Tensor, dtype: torch.dtype
) -> Tensor:
    """Tokens into the first rows of the buffer, zeros behind; in the type of the products."""
    num_rows = tokens_R.shape[0]
    torch.index_select(source_TD, 0, tokens_R, out=out_RD[:num_rows])
    if num_rows < out_RD.shape[0]:
        out_RD[num_rows:].zero_()
    return out_RD.to(dtype)


def row_weights(weights_TK: Tensor, maps: Maps, num_live: int, dtype: torch.dtype) -> Tensor:
    """Routing weights of the live rows (R,), FP32 or FP64."""
    rows = weights_TK.reshape(-1).index_select(0, maps.slot_of_row_N[:num_live])
    return rows.to(accumulate_dtype(dtype))
