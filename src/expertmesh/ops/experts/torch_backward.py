"""Torch backend of `moe_mlp`, backward: GEMMs per expert from the saved X and H.

Neighbouring experts with few rows are processed together, as in the forward. `backward` computes weight gradients while
the hidden gradients are still in the cache. `data_grads` and `weight_grads` run the same steps separately and keep all
hidden rows in between; bits are the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.cpu.activation_passes import Passes, passes_for
from expertmesh.ops.cpu.compiled_passes import CompiledPasses
from expertmesh.ops.cpu.products import product_into, selected
from expertmesh.ops.dtypes import gemm_dtype
from expertmesh.ops.experts.expert_spans import ExpertSpan, make_runs
from expertmesh.ops.experts.torch_forward import hidden, row_weights
from expertmesh.ops.experts.weights import ExpertSlice, HiddenGradients, Needs
from expertmesh.ops.permute import sum_rows
from expertmesh.ops.route_metadata import RouteMetadata

RUN_ELEMENTS = 1 << 18
"""Maximum number of elements of H for which several experts are processed together in the backward."""


def backward(
    grad_TD: Tensor,  # (T, D) gradient of y, contiguous
    x_TD: Tensor,  # the tokens as given to `forward`
    h_RH: Tensor,  # H of `forward`; with fewer rows than R it is recomputed, expert by expert
    experts: ExpertSlice,  # the experts as given to `forward`
    weights_TK: Tensor,  # the weights as given to `forward`
    maps: RouteMetadata,  # the maps as given to `forward`
    needs: Needs,  # the gradients to compute
    *,
    into: ExpertSlice | None = None,
) -> tuple[Tensor | None, Tensor | None, ExpertSlice]:
    """Compute the gradients of x (T, D), of the routing weights (T, K), and of the experts.

    Args:
        into: buffers that the experts' gradients are added to (see `weight_grads`); None: fresh tensors.

    Returns:
        dx or None, the routing weights' gradient or None, and the experts' gradients as `weight_grads` returns them.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    data = _DataBuffers.of(steps, h_RH)
    grads = _weight_buffers(x_TD, experts, needs, into)
    a_buffer, d_h_buffer = steps.hidden_rows(steps.most)
    for run in steps.runs:
        a, d_h = a_buffer[: run.num_places], d_h_buffer[: run.num_places]
        d_y = steps.data(run, data, a, d_h)
        steps.weights(run, a, d_h, grads, d_y=d_y, add=into is not None)
    if into is None:
        steps.zero_empty(grads)
    return *steps.finish(data), grads


def data_grads(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: ExpertSlice,
    weights_TK: Tensor,
    maps: RouteMetadata,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, HiddenGradients]:
    """Compute the gradients of x and of the routing weights, and the hidden rows for `weight_grads`.

    Arguments as in `backward`; `needs` includes the gradients that `weight_grads` will compute. The hidden rows take
    R * (1 + G) * F elements, plus `gemm_rows`' padding on CPUs that multiply BF16.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    data = _DataBuffers.of(steps, h_RH)
    sizes = [run.num_places for run in steps.runs]
    a_all, d_h_all = steps.hidden_rows(sum(sizes))
    for run, a, d_h in zip(steps.runs, a_all.split(sizes), d_h_all.split(sizes), strict=True):
        steps.data(run, data, a, d_h)
    needs_h = needs.w_in or needs.b_in
    hidden = HiddenGradients(a_all if needs.w_out else None, d_h_all if needs_h else None)
    return *steps.finish(data), hidden


def weight_grads(
    grad_TD: Tensor,  # the gradient as given to `data_grads`
    x_TD: Tensor,  # the tokens as given to `forward`
    hidden: HiddenGradients,  # from `data_grads`
    experts: ExpertSlice,  # the experts as given to `forward`
    weights_TK: Tensor,  # the weights as given to `forward`
    maps: RouteMetadata,  # the maps as given to `forward`
    needs: Needs,  # the gradients to compute
    *,
    into: ExpertSlice | None = None,
) -> ExpertSlice:
    """Compute the gradients of the experts' weights and biases; experts without rows get zeros.

    Args:
        into: FP32 or FP64 buffers to add to, in place. Products of BF16 matrices are rounded to BF16 expert by expert
            before they are added, because PyTorch's CPU GEMMs return no wider dtype; the sum is never rounded.

    Returns:
        Gradients in the fields of the weights; unneeded w_in and w_out are empty, unneeded biases None. Bitwise
        deterministic.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    grads = _weight_buffers(x_TD, experts, needs, into)
    first = 0
    for run in steps.runs:
        places = slice(first, first + run.num_places)
        a = None if hidden.a_RF is None else hidden.a_RF[places]
        d_h = None if hidden.d_h_RH is None else hidden.d_h_RH[places]
        steps.weights(run, a, d_h, grads, add=into is not None)
        first = places.stop
    if into is None:
        steps.zero_empty(grads)
    return grads


@dataclass(frozen=True)
class _DataBuffers:
    """Buffers of `_Steps.data` beside the hidden rows."""

    h_RH: Tensor | None  # the saved H; None: recomputed
    h_again: Tensor  # buffer for the recomputed H of one run
    d_a: Tensor  # buffer for the gradient of A of one run
    d_x_RD: Tensor  # receives the gradient of the gathered x; no rows if it is not needed
    d_s_R: Tensor  # receives the gradient of the rows' routing weights
    passes: Passes | CompiledPasses  # the activation passes

    @staticmethod
    def of(steps: "_Steps", h_RH: Tensor) -> "_DataBuffers":
        num_rows = steps.maps.token_of_row_N.shape[0]
        saved = h_RH.shape[0] == num_rows
        live = steps.bounds[-1]
        _, G, F, D = steps.experts.shape
        d_a = steps.new(steps.most, F)
        pad = max((run.padding for run in steps.runs), default=0)
        passes = passes_for(steps.experts.activation, d_a, num_rows=num_rows, backward=True)
        return _DataBuffers(
            h_RH if saved else None,
            steps.new(0 if saved else steps.most, G * F),
            d_a,
            steps.new(live + pad if steps.needs.x else 0, D),
            torch.empty_like(steps.s_R),
            passes,
        )


@dataclass(frozen=True)
class _Steps:
    """Steps of the backward for a span of experts, with their shared inputs and buffers."""

    grad_TD: Tensor
    x_TD: Tensor
    experts: ExpertSlice
    weights_TK: Tensor
    maps: RouteMetadata
    needs: Needs
    bounds: list[int]
    dtype: torch.dtype
    runs: list[ExpertSpan]
    most: int
    s_R: Tensor
    rows: Tensor

    @staticmethod
    def of(
        grad_TD: Tensor,
        x_TD: Tensor,
        experts: ExpertSlice,
        weights_TK: Tensor,
        maps: RouteMetadata,
        needs: Needs,
    ) -> "_Steps":
        bounds = maps.offsets_E.tolist()
        dtype = gemm_dtype(x_TD.device, x_TD.dtype)
        _, G, F, D = experts.shape
        most_places = RUN_ELEMENTS // (G * F)
        runs = make_runs(bounds, most_places, x_TD.device, dtype, is_narrow=experts.are_narrow)
        most = max((run.num_places for run in runs), default=0)
        s_R = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
        rows = x_TD.new_empty(most, D)
        call = (grad_TD, x_TD, experts, weights_TK, maps, needs)
        return _Steps(*call, bounds, dtype, runs, most, s_R, rows)

    def new(self, *shape: int) -> Tensor:
        return self.x_TD.new_empty(shape, dtype=self.dtype)

    def hidden_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Allocate buffers for A' and dH."""
        _, G, F, _ = self.experts.shape
        return self.new(num_rows, F), self.new(num_rows, G * F)

    def gather(self, source_TD: Tensor, run: ExpertSpan) -> Tensor:
        """Gather the tokens of a span; the buffer of the previous call is reused."""
        out = self.rows[: run.num_places]
        torch.index_select(source_TD, 0, run.taken(self.maps.token_of_row_N), out=out)
        return out.to(self.dtype)

    def data(self, run: ExpertSpan, data: _DataBuffers, a: Tensor, d_h: Tensor) -> Tensor:
        """Write A' and dH of a span with zeros in the padding, and dx and ds; return the gathered gradient of y."""
        h, rows = self._hidden(run, data)
        d_y, d_a = self.gather(self.grad_TD, run), data.d_a[: run.num_places]
        weights = self.experts.w_outs(run.experts, self.dtype, self.x_TD.dtype)
        for w, d_y_e, d_a_e in zip(weights, run.split(d_y), run.split(d_a), strict=True):
            product_into(d_y_e, w, d_a_e)
        # weight gradients sum over places, so A' and dH are zero in the padding
        s = run.without_padding(run.taken(self.s_R))
        d_s = data.passes.backward(d_a, h, rows, s, a, d_h)
        if self.experts.b_out_ED is not None:
            for e, d_y_e, d_s_e in zip(run.experts, run.split(d_y), run.split(d_s), strict=True):
                d_s_e.add_(torch.mv(d_y_e, self.experts.b_out_ED[e].to(self.dtype)))
        if run.live is not None:
            torch.masked_select(d_s, run.live, out=data.d_s_R[run.rows])
        else:
            data.d_s_R[run.rows] = d_s
        if self.needs.x:
            # padding writes to rows of later experts, which overwrite it, or behind the last row
            weights, d_x = (
                self.experts.w_ins(run.experts, self.dtype, self.x_TD.dtype),
                run.rows_of(data.d_x_RD),
            )
            for w, d_h_e, d_x_e in zip(weights, run.split(d_h), d_x, strict=True):
                product_into(d_h_e, w, d_x_e)
        return d_y

    def _hidden(self, run: ExpertSpan, data: _DataBuffers) -> tuple[Tensor, Tensor | None]:
        """H, saved or recomputed, and the rows of H at a span's places; None: all rows, in order."""
        h, rows = data.h_RH, run.row_of_place
        if h is None:
            x, h = self.gather(self.x_TD, run), data.h_again[: run.num_places]
            columns = (self.experts.w_ins(run.experts, self.dtype, self.x_TD.dtype), run.experts)
            for w, e, x_e, h_e in zip(*columns, run.split(x), run.split(h), strict=True):
                hidden(self.experts, e, x_e, h_e, w)
            return h.to(self.x_TD.dtype).to(self.dtype), None
        if rows is None:
            return h[run.rows].to(self.dtype), None
        if h.dtype != self.dtype:
            return h.index_select(0, rows).to(self.dtype), None
        return h, rows

    def weights(
        self,
        run: ExpertSpan,
        a: Tensor | None,
        d_h: Tensor | None,
        grads: ExpertSlice,
        *,
        add: bool,
        d_y: Tensor | None = None,
    ) -> None:
        """Write or add the gradients of weights and biases of a span's experts."""
        needs = self.needs
        if needs.w_out or needs.b_out:
            d_y = self.gather(self.grad_TD, run) if d_y is None else d_y
            if needs.w_out and a is not None:
                _products_into(run, d_y, a, grads.w_out_EDF, add)
            if grads.b_out_ED is not None:
                s = run.without_padding(run.taken(self.s_R))
                for e, d_y_e, s_e in zip(run.experts, run.split(d_y), run.split(s), strict=True):
                    _put(torch.mv(d_y_e.T.to(s.dtype), s_e), grads.b_out_ED[e], add)
        if d_h is not None and grads.b_in_EGF is not None:
            for e, d_h_e in zip(run.experts, run.split(d_h), strict=True):
                _put(d_h_e.sum(0, dtype=self.s_R.dtype), grads.b_in_EGF[e], add)
        if needs.w_in and d_h is not None:
            _products_into(run, d_h, self.gather(self.x_TD, run), grads.w_in_EGFD, add)

    def zero_empty(self, grads: ExpertSlice) -> None:
        """Zero the gradients of experts without rows."""
        for e, (start, stop) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if start == stop:
                for grad in (grads.w_in_EGFD, grads.w_out_EDF, grads.b_in_EGF, grads.b_out_ED):
                    if grad is not None and grad.numel():
                        grad[e].zero_()

    def finish(self, data: _DataBuffers) -> tuple[Tensor | None, Tensor | None]:
        """Sum dx per token, and scatter the gradients of the rows' routing weights to their slots."""
        d_x = d_weights = None
        maps = self.maps
        if self.needs.x:
            d_x = sum_rows(data.d_x_RD, maps.offsets_E, maps.row_of_slot_N, self.weights_TK.shape[1])
            d_x = d_x.to(self.x_TD.dtype)
        if self.needs.weights:
            d_weights = torch.zeros_like(self.weights_TK, memory_format=torch.contiguous_format)
            live = maps.slot_of_row_N[: len(data.d_s_R)]
            d_weights.view(-1)[live] = data.d_s_R.to(d_weights.dtype)
        return d_x, d_weights


def _weight_buffers(x_TD: Tensor, experts: ExpertSlice, needs: Needs, into: ExpertSlice | None) -> ExpertSlice:
    """Buffers of the gradients: new tensors, or the given ones; unneeded gradients are empty or None."""

    def bias(tensor: Tensor | None, given: Tensor | None, needed: bool) -> Tensor | None:
        if tensor is None or not needed:
            return None
        return x_TD.new_empty(tensor.shape) if given is None else given

    def weight(tensor: Tensor, given: Tensor | None, needed: bool) -> Tensor:
        if not needed:
            return x_TD.new_empty(0)
        return x_TD.new_empty(tensor.shape) if given is None else given

    return ExpertSlice(
        weight(experts.w_in_EGFD, None if into is None else into.w_in_EGFD, needs.w_in),
        weight(experts.w_out_EDF, None if into is None else into.w_out_EDF, needs.w_out),
        bias(experts.b_in_EGF, None if into is None else into.b_in_EGF, needs.b_in),
        bias(experts.b_out_ED, None if into is None else into.b_out_ED, needs.b_out),
        experts.activation,
    )


def _put(value: Tensor, out: Tensor, add: bool) -> None:
    value = value.view(out.shape)
    if add:
        out.add_(value)
    else:
        out.copy_(value)


def _products_into(run: ExpertSpan, a: Tensor, b: Tensor, grads: Tensor, add: bool) -> None:
    """Write or add a^T b of every expert of a span, as (rows of a^T, columns of b)."""
    direct = grads.dtype == a.dtype and grads.is_contiguous()
    # views of the span's experts only: views of all experts for every span were 8,192 in a step of 64 experts
    outs = selected(grads.view(grads.shape[0], -1, grads.shape[-1]) if direct else grads, run.experts)
    for out, a_e, b_e in zip(outs, run.split(a), run.split(b), strict=True):
        if not direct:
            _put(torch.mm(a_e.T, b_e), out, add)
        else:
            product_into(a_e.T, b_e, out, add=add)
