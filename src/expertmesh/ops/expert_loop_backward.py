"""The "torch" backend of `moe_mlp`, backward: GEMMs per expert from X and H; nothing else was saved.

`backward` takes an expert's hidden gradients from the cache into the weights' gradients at once. `data_grads` and
`weight_grads` are the same steps with all hidden rows kept in between, to the same bits.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from expertmesh.ops.activation_passes import Passes
from expertmesh.ops.backend import gemm_dtype, gemm_rows
from expertmesh.ops.expert_loop import (
    Experts,
    HiddenGradients,
    Maps,
    Needs,
    gather_tokens,
    largest_block,
    row_weights,
)
from expertmesh.ops.permute import sum_rows


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: Experts,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
    *,
    into: Experts | None = None,
) -> tuple[Tensor | None, Tensor | None, Experts]:
    """Give the gradients of x (T, D), of the routing weights (T, K), and of the experts.

    Args:
        grad_TD: (T, D) gradient of y, contiguous.
        x_TD: as given to `forward`.
        h_RH: H of `forward`; with fewer rows than R it is computed again, expert by expert.
        experts: as given to `forward`.
        weights_TK: as given to `forward`.
        maps: as given to `forward`.
        needs: which gradients are wanted.
        into: buffers that the experts' gradients are added to (see `weight_grads`); None: fresh tensors.

    Returns:
        dx or None, the routing weights' gradient or None, and the experts' gradients as `weight_grads` gives them.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    data = _DataBuffers.of(steps, h_RH)
    grads = _weight_buffers(x_TD, experts, needs, into)
    a_buffer, d_h_buffer = steps.hidden_rows(steps.most)
    for e, start, stop in steps.blocks():
        m = steps.padded(stop - start)
        a, d_h = a_buffer[:m], d_h_buffer[:m]
        d_y = steps.data(e, start, stop, data, a, d_h)
        steps.weights(e, start, stop, a, d_h, grads, d_y=d_y, add=into is not None)
    if into is None:
        steps.zero_empty(grads)
    return *steps.finish(data), grads


def data_grads(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: Experts,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, HiddenGradients]:
    """Give the gradients of x and of the routing weights, and what the weights' gradients need later.

    Arguments are those of `backward`; `needs` includes what `weight_grads` will be asked for. The hidden rows take
    R * (1 + G) * F elements, plus `gemm_rows`' padding on CPUs that multiply BF16.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    data = _DataBuffers.of(steps, h_RH)
    starts = steps.padded_starts()
    a_all, d_h_all = steps.hidden_rows(starts[-1])
    for e, start, stop in steps.blocks():
        rows = slice(starts[e], starts[e + 1])
        steps.data(e, start, stop, data, a_all[rows], d_h_all[rows])
    needs_h = needs.w_in or needs.b_in
    hidden = HiddenGradients(a_all if needs.w_out else None, d_h_all if needs_h else None)
    return *steps.finish(data), hidden


def weight_grads(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: HiddenGradients,
    experts: Experts,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
    *,
    into: Experts | None = None,
) -> Experts:
    """Give the gradients of the experts' weights and biases; experts without rows get zeros.

    Args:
        grad_TD: as given to `data_grads`.
        x_TD: as given to `forward`.
        hidden: from `data_grads`.
        experts: as given to `forward`.
        weights_TK: as given to `forward`.
        maps: as given to `forward`.
        needs: which gradients are wanted.
        into: FP32 or FP64 buffers to add to, in place. Products of BF16 matrices are rounded to BF16 expert by expert
            before they are added, because PyTorch's CPU GEMMs give no wider result; the sum is never rounded.

    Returns:
        Gradients in the places of the weights; w_in and w_out that are not wanted are empty, biases None. Bitwise
        deterministic.
    """
    steps = _Steps.of(grad_TD, x_TD, experts, weights_TK, maps, needs)
    grads = _weight_buffers(x_TD, experts, needs, into)
    starts = steps.padded_starts()
    for e, start, stop in steps.blocks():
        rows = slice(starts[e], starts[e + 1])
        a = None if hidden.a_RF is None else hidden.a_RF[rows]
        d_h = None if hidden.d_h_RH is None else hidden.d_h_RH[rows]
        steps.weights(e, start, stop, a, d_h, grads, add=into is not None)
    if into is None:
        steps.zero_empty(grads)
    return grads


@dataclass(frozen=True)
class _DataBuffers:
    """What `_Steps.data` reads and writes beside the hidden rows.

    Attributes:
        h_RH: the saved H, or None: computed again.
        h_again: room for H of one expert, where it is computed again.
        d_a: room for the gradient of A of one expert.
        d_x_RD: receives the gradient of the gathered x; no rows where it is not wanted.
        d_s_R: receives the gradient of the rows' weights.
        passes: the activation.
    """

    h_RH: Tensor | None
    h_again: Tensor
    d_a: Tensor
    d_x_RD: Tensor
    d_s_R: Tensor
    passes: Passes

    @staticmethod
    def of(steps: "_Steps", h_RH: Tensor) -> "_DataBuffers":
        saved = h_RH.shape[0] == steps.maps.token_of_row_N.shape[0]
        live = steps.bounds[-1]
        _, G, F, D = steps.experts.w_in_EGFD.shape
        d_a = steps.new(steps.most, F)
        return _DataBuffers(
            h_RH if saved else None,
            steps.new(0 if saved else steps.most, G * F),
            d_a,
            steps.new(live + steps.pad if steps.needs.x else 0, D),
            torch.empty_like(steps.s_R),
            Passes.allocate(steps.experts.activation, d_a, backward=True),
        )


@dataclass(frozen=True)
class _Steps:
    """The steps of the backward for one expert, and what they share."""

    grad_TD: Tensor
    x_TD: Tensor
    experts: Experts
    weights_TK: Tensor
    maps: Maps
    needs: Needs
    bounds: list[int]
    dtype: torch.dtype
    most: int
    pad: int
    s_R: Tensor
    rows: Tensor

    @staticmethod
    def of(
        grad_TD: Tensor,
        x_TD: Tensor,
        experts: Experts,
        weights_TK: Tensor,
        maps: Maps,
        needs: Needs,
    ) -> "_Steps":
        bounds = maps.offsets_E.tolist()
        dtype = gemm_dtype(x_TD.device, x_TD.dtype)
        most, pad = largest_block(bounds, x_TD.device, dtype, is_narrow=experts.are_narrow)
        s_R = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
        rows = x_TD.new_empty(most, x_TD.shape[1])
        call = (grad_TD, x_TD, experts, weights_TK, maps, needs)
        return _Steps(*call, bounds, dtype, most, pad, s_R, rows)

    def new(self, *shape: int) -> Tensor:
        return self.x_TD.new_empty(shape, dtype=self.dtype)

    def hidden_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Room for A' and dH."""
        _, G, F, _ = self.experts.w_in_EGFD.shape
        return self.new(num_rows, F), self.new(num_rows, G * F)

    def padded(self, num_rows: int) -> int:
        is_narrow = self.experts.are_narrow
        return gemm_rows(num_rows, self.x_TD.device, self.dtype, is_narrow=is_narrow)

    def padded_starts(self) -> list[int]:
        """Where the experts' blocks start when each has room for its padding."""
        counts = (stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))
        return list(accumulate((self.padded(n) if n else 0 for n in counts), initial=0))

    def blocks(self) -> list[tuple[int, int, int]]:
        """Expert, first row and end of all blocks that are not empty."""
        pairs = enumerate(zip(self.bounds, self.bounds[1:], strict=False))
        return [(e, start, stop) for e, (start, stop) in pairs if stop > start]

    def gather(self, source_TD: Tensor, start: int, stop: int) -> Tensor:
        """Tokens of a block, with zeros in the padding; the buffer is that of the last call."""
        tokens = self.maps.token_of_row_N[start:stop]
        m = self.padded(stop - start)
        return gather_tokens(source_TD, tokens, self.rows[:m], self.dtype)

    def data(
        self, e: int, start: int, stop: int, data: _DataBuffers, a: Tensor, d_h: Tensor
    ) -> Tensor:
        """Write A' and dH of a block with zeros in the padding, dx and ds; give the gathered gradient of y."""
        n, m = stop - start, a.shape[0]
        h = self._hidden(e, start, stop, data)
        d_y, d_a, d_s = self.gather(self.grad_TD, start, stop), data.d_a[:m], data.d_s_R[start:stop]
        torch.mm(d_y, self.experts.w_out(e, self.dtype), out=d_a)
        data.passes.backward(d_a, h, self.s_R[start:stop], a, d_h, d_s)
        if n < m:
            # weight gradients sum over rows, so the padding is zero in both factors
            a[n:].zero_()
            d_h[n:].zero_()
        if self.experts.b_out_ED is not None:
            d_s.add_(torch.mv(d_y[:n], self.experts.b_out_ED[e].to(self.dtype)))
        if self.needs.x:
            torch.mm(d_h, self.experts.w_in(e, self.dtype), out=data.d_x_RD[start : start + m])
        return d_y

    def _hidden(self, e: int, start: int, stop: int, data: _DataBuffers) -> Tensor:
        """H of a block, as it was saved or would have been."""
        if data.h_RH is not None:
            return data.h_RH[start:stop].to(self.dtype)
        x = self.gather(self.x_TD, start, stop)
        h = data.h_again[: x.shape[0]]
        self.experts.hidden(e, x, h)
        return h[: stop - start].to(self.x_TD.dtype).to(self.dtype)

    def weights(
        self,
        e: int,
        start: int,
        stop: int,
        a: Tensor | None,
        d_h: Tensor | None,
        grads: Experts,
        *,
        add: bool,
        d_y: Tensor | None = None,
    ) -> None:
        """Write or add the gradients of one expert's weights and biases."""
        n, s, needs = stop - start, self.s_R[start:stop], self.needs
        if needs.w_out or needs.b_out:
            d_y = self.gather(self.grad_TD, start, stop) if d_y is None else d_y
            if needs.w_out and a is not None:
                _product_into(d_y.T, a, grads.w_out_EDF[e], add)
            if grads.b_out_ED is not None:
                _put(torch.mv(d_y[:n].T.to(s.dtype), s), grads.b_out_ED[e], add)
        if d_h is not None and grads.b_in_EGF is not None:
            _put(d_h[:n].sum(0, dtype=s.dtype), grads.b_in_EGF[e], add)
        if needs.w_in and d_h is not None:
            x = self.gather(self.x_TD, start, stop)
            _product_into(d_h.T, x, grads.w_in_EGFD[e], add)

    def zero_empty(self, grads: Experts) -> None:
        """Zero the gradients of experts without rows."""
        for e, (start, stop) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if start == stop:
                for grad in (grads.w_in_EGFD, grads.w_out_EDF, grads.b_in_EGF, grads.b_out_ED):
                    if grad is not None and grad.numel():
                        grad[e].zero_()

    def finish(self, data: _DataBuffers) -> tuple[Tensor | None, Tensor | None]:
        """Sum dx per token, and put the gradients of the rows' weights where the weights are."""
        d_x = d_weights = None
        maps = self.maps
        if self.needs.x:
            d_x = sum_rows(
                data.d_x_RD, maps.offsets_E, maps.row_of_slot_N, self.weights_TK.shape[1]
            )
            d_x = d_x.to(self.x_TD.dtype)
        if self.needs.weights:
            d_weights = torch.zeros_like(self.weights_TK, memory_format=torch.contiguous_format)
            live = maps.slot_of_row_N[: len(data.d_s_R)]
            d_weights.view(-1)[live] = data.d_s_R.to(d_weights.dtype)
        return d_x, d_weights


def _weight_buffers(x_TD: Tensor, experts: Experts, needs: Needs, into: Experts | None) -> Experts:
    """Where the gradients go: fresh tensors, or the given buffers; those not wanted are empty or None."""

    def bias(tensor: Tensor | None, given: Tensor | None, needed: bool) -> Tensor | None:
        if tensor is None or not needed:
            return None
        return x_TD.new_empty(tensor.shape) if given is None else given

    def weight(tensor: Tensor, given: Tensor | None, needed: bool) -> Tensor:
        if not needed:
            return x_TD.new_empty(0)
        return x_TD.new_empty(tensor.shape) if given is None else given

    return Experts(
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


def _product_into(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Write or add a @ b, whose rows are the first dimensions of out."""
    if out.dtype != a.dtype or not out.is_contiguous():
        _put(torch.mm(a, b), out, add)
        return
    flat = out.view(-1, out.shape[-1])
    if add:
        torch.addmm(flat, a, b, out=flat)
    else:
        torch.mm(a, b, out=flat)
