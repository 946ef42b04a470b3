"""The "torch" backend of `moe_mlp`: one GEMM per expert and step over its block of sorted rows.

Buffers are reused from expert to expert so that they stay in the cache, results are written where they belong
(H, the weight gradients), and nothing is copied but the gathered tokens. Nothing here is seen by autograd.
"""

from dataclasses import dataclass, replace

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
class Gradients:
    """The gradients of one call; those not needed are empty tensors."""

    x_TD: Tensor
    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    weights_TK: Tensor
    b_in_EGF: Tensor
    b_out_ED: Tensor


def forward(
    x_TD: Tensor, experts: Experts, weights_TK: Tensor, maps: Maps, *, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Give (y (T, D), H (R, G * F)); H is empty unless save_h. Synchronises with a GPU to read the offsets."""
    _, G, F, D = experts.w_in_EGFD.shape
    num_rows = maps.token_of_row_N.shape[0]
    bounds = maps.offsets_E.tolist()
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    most, pad = _largest_block(bounds, x_TD.device, dtype)
    h_all = x_TD.new_empty(num_rows if save_h else 0, G * F)
    if pad == 0 and bounds[-1] * G * F <= FEW_ELEMENTS:
        return _forward_of_few(x_TD, experts, weights_TK, maps, bounds, h_all), h_all
    y_RD = x_TD.new_empty(bounds[-1] + pad, D, dtype=dtype)
    x_buffer = x_TD.new_empty(most, D)
    h_buffer = x_TD.new_empty(most, G * F, dtype=dtype)
    a_buffer = x_TD.new_empty(most, F, dtype=dtype)
    s_R = _row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
    passes = Passes.allocate(experts.activation, a_buffer, backward=False)
    for e, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            continue
        n = stop - start
        m = gemm_rows(n, x_TD.device, dtype)
        x = _gather(x_TD, maps.token_of_row_N[start:stop], x_buffer[:m], dtype)
        # padding rows land on those of the next experts, which are written later, but never behind the last one
        direct = save_h and dtype == x_TD.dtype and start + m <= num_rows
        h = h_all[start : start + m] if direct else h_buffer[:m]
        w_in = experts.w_in(e, dtype).T
        if experts.b_in_EGF is None:
            torch.mm(x, w_in, out=h)
        else:
            # inside the product, so that the sum is rounded once: a second rounding moves H across the kink of ReLU
            torch.addmm(experts.b_in_EGF[e].reshape(G * F).to(dtype), x, w_in, out=h)
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
        if experts.b_in_EGF is None:
            torch.mm(x, experts.w_in(e, dtype).T, out=h)
        else:
            bias = experts.b_in_EGF[e].reshape(G * F).to(dtype)
            torch.addmm(bias, x, experts.w_in(e, dtype).T, out=h)
    if h_all.numel() and not direct:
        h_all[:num_rows].copy_(h_RH)
    s_R = _row_weights(weights_TK, maps, num_rows, x_TD.dtype)
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


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: Experts,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
) -> Gradients:
    """Give all gradients from the output's, X and H; nothing else was saved."""
    _, G, F, D = experts.w_in_EGFD.shape
    bounds = maps.offsets_E.tolist()
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    most, pad = _largest_block(bounds, x_TD.device, dtype)
    grads = _allocate_gradients(x_TD, experts, needs)
    d_x_RD = x_TD.new_empty(bounds[-1] + pad if needs.x else 0, D, dtype=dtype)
    s_R = _row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
    d_s_R = torch.empty_like(s_R)
    rows_buffer = x_TD.new_empty(most, D)
    da_buffer, a_buffer = (x_TD.new_empty(most, F, dtype=dtype) for _ in range(2))
    dh_buffer = x_TD.new_empty(most, G * F, dtype=dtype)
    passes = Passes.allocate(experts.activation, a_buffer, backward=True)
    for e, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            _zero_expert(grads, e)
            continue
        n, s, d_s = stop - start, s_R[start:stop], d_s_R[start:stop]
        m = gemm_rows(n, x_TD.device, dtype)
        tokens = maps.token_of_row_N[start:stop]
        # weight gradients sum over rows, so the padding is zero in both factors
        d_y = _gather(grad_TD, tokens, rows_buffer[:m], dtype)
        d_a, a, d_h = da_buffer[:m], a_buffer[:m], dh_buffer[:m]
        torch.mm(d_y, experts.w_out(e, dtype), out=d_a)
        passes.backward(d_a, h_RH[start:stop].to(dtype), s, a, d_h, d_s)
        if n < m:
            a[n:].zero_()
            d_h[n:].zero_()
        if needs.w_out:
            _mm_into(d_y.T, a, grads.w_out_EDF[e])
        if experts.b_out_ED is not None:
            d_s.add_(torch.mv(d_y[:n], experts.b_out_ED[e].to(dtype)))
            if needs.b_out:
                grads.b_out_ED[e] = torch.mv(d_y[:n].T.to(s.dtype), s)
        if needs.b_in and experts.b_in_EGF is not None:
            grads.b_in_EGF[e] = d_h[:n].sum(0, dtype=s.dtype).view(G, F)
        if needs.x:
            torch.mm(d_h, experts.w_in(e, dtype), out=d_x_RD[start : start + m])
        if needs.w_in:
            x = _gather(x_TD, tokens, rows_buffer[:m], dtype)
            _mm_into(d_h.T, x, grads.w_in_EGFD[e].view(G * F, D))
    return _finish(grads, d_x_RD, d_s_R, weights_TK, maps, needs)


def _largest_block(bounds: list[int], device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of the largest padded block, and the largest padding."""
    counts = {stop - start for start, stop in zip(bounds, bounds[1:], strict=False)}
    padded = [(gemm_rows(n, device, dtype), n) for n in counts]
    return max((m for m, _ in padded), default=0), max((m - n for m, n in padded), default=0)


def _gather(source_TD: Tensor, tokens_R: Tensor, out_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens into the first rows of the buffer, zeros behind; in the type of the products."""
    num_rows = tokens_R.shape[0]
    torch.index_select(source_TD, 0, tokens_R, out=out_RD[:num_rows])
    if num_rows < out_RD.shape[0]:
        out_RD[num_rows:].zero_()
    return out_RD.to(dtype)


def _row_weights(weights_TK: Tensor, maps: Maps, num_live: int, dtype: torch.dtype) -> Tensor:
    rows = weights_TK.reshape(-1).index_select(0, maps.slot_of_row_N[:num_live])
    return rows.to(accumulate_dtype(dtype))


def _mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _allocate_gradients(x_TD: Tensor, experts: Experts, needs: Needs) -> Gradients:
    def empty_like(tensor: Tensor | None, needed: bool) -> Tensor:
        # a fresh tensor even when empty: outputs of one operator may not be the same tensor
        return x_TD.new_empty((0,) if tensor is None or not needed else tensor.shape)

    return Gradients(
        x_TD=x_TD.new_empty(0),
        w_in_EGFD=empty_like(experts.w_in_EGFD, needs.w_in),
        w_out_EDF=empty_like(experts.w_out_EDF, needs.w_out),
        weights_TK=x_TD.new_empty(0),
        b_in_EGF=empty_like(experts.b_in_EGF, needs.b_in),
        b_out_ED=empty_like(experts.b_out_ED, needs.b_out),
    )


def _zero_expert(grads: Gradients, e: int) -> None:
    for grad in (grads.w_in_EGFD, grads.w_out_EDF, grads.b_in_EGF, grads.b_out_ED):
        if grad.numel():
            grad[e].zero_()


def _finish(
    grads: Gradients,
    d_x_RD: Tensor,
    d_s_R: Tensor,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
) -> Gradients:
    if needs.x:
        d_x = sum_rows(d_x_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
        grads = replace(grads, x_TD=d_x.to(grads.x_TD.dtype))
    if needs.weights:
        d_weights = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
        d_weights.view(-1)[maps.slot_of_row_N[: len(d_s_R)]] = d_s_R.to(weights_TK.dtype)
        grads = replace(grads, weights_TK=d_weights)
    return grads
