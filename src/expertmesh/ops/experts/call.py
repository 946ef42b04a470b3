"""One call of the experts on either backend, with weights that come as slices along F; whole weights are one slice.

y = act(x W_in^T) W_out^T is a sum over the hidden units, so slices of F are experts of their own whose results add
up. Nothing is concatenated: gathered shards are used where they lie. Results of the slices, (T, D) each, are added in
FP32 (FP64 for FP64) in the order of the slices.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from expertmesh.ops.cpu import backward as loop_backward
from expertmesh.ops.cpu import forward as loop_forward
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.expert_types import Experts, HiddenGradients, Needs
from expertmesh.ops.experts import triton_backend
from expertmesh.ops.route_metadata import RouteMetadata


class ExpertsCall(NamedTuple):
    """Arguments of `moe_mlp`, checked and cast: the operators take its fields one by one, the backends slice by slice.

    Attributes:
        x_TD: (T, D) tokens.
        weights_TK: (T, K) routing weights.
        w_in: first weights, (E, G, F_i, D) of every slice.
        w_out: second weights, (E, D, F_i) of every slice.
        b_in: first bias, (E, G, F_i) of every slice; empty without one.
        b_out: second bias (E, D); empty without one.
        maps: the tensors of `RouteMetadata`.
        activation: the name of the activation.
        backend: "torch" or "triton"; "reference" is for those who look before they call.
    """

    x_TD: Tensor
    weights_TK: Tensor
    w_in: list[Tensor]
    w_out: list[Tensor]
    b_in: list[Tensor]
    b_out: list[Tensor]
    maps: list[Tensor]
    activation: str
    backend: str

    @property
    def parameters(self) -> list[Tensor]:
        """Weights and biases: w_in of all slices, w_out of all, b_in of all, b_out. Gradients have this order."""
        return [*self.w_in, *self.w_out, *self.b_in, *self.b_out]

    @property
    def differentiable(self) -> list[Tensor]:
        """All tensors that may want a gradient."""
        return [self.x_TD, self.weights_TK, *self.parameters]

    def slices(self, tensors: Sequence[Any]) -> list[Experts]:
        """Tensors in the places of the parameters, slice by slice; only the first has b_out."""
        return [
            Experts(w_in, w_out, b_in, b_out, self.activation)
            for w_in, w_out, b_in, b_out in self._by_slice(tensors, None)
        ]

    def _by_slice(self, values: Sequence[Any], missing: Any) -> Iterator[tuple[Any, ...]]:
        """Values in the order of the parameters -> (w_in, w_out, b_in, b_out) of every slice."""
        n, after = len(self.w_in), 2 * len(self.w_in) + len(self.b_in)
        b_in, b_out, others = values[2 * n : after], values[after:], [missing] * n
        return zip(
            values[:n], values[n : 2 * n], b_in or others, [*b_out, *others][:n], strict=True
        )

    def _steps(
        self, needs: Sequence[bool], main: Sequence[Tensor]
    ) -> list[tuple[tuple[Any, ...], Experts | None]]:
        """Of every slice what all functions of a backward are given last, and the buffers to add to."""
        x, weights, *rest = needs
        into = self.slices(main) if main else [None] * len(self.w_in)
        metadata = RouteMetadata(*self.maps)
        return [
            ((experts, self.weights_TK, metadata, Needs(x, w_in, w_out, weights, b_in, b_out)), to)
            for experts, (w_in, w_out, b_in, b_out), to in zip(
                self.slices(self.parameters), self._by_slice(rest, False), into, strict=True
            )
        ]

    @property
    def _backward(self) -> ModuleType:
        return triton_backend if self.backend == "triton" else loop_backward

    def forward(self, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
        """Give y (T, D) and H (R, G * F_i) of every slice, without rows unless save_h."""
        module = triton_backend if self.backend == "triton" else loop_forward
        total, hidden, metadata = None, [], RouteMetadata(*self.maps)
        for experts in self.slices(self.parameters):
            y, h = module.forward(self.x_TD, experts, self.weights_TK, metadata, save_h=save_h)
            total = _added(total, y)
            hidden.append(h)
        assert total is not None
        return total.to(self.x_TD.dtype), hidden

    def backward(
        self,
        grad_TD: Tensor,
        hidden: Sequence[Tensor],
        needs: Sequence[bool],
        main: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Give the gradients of `differentiable`, as far as needed, or add those of the parameters to `main`."""
        d_x, d_weights, grads = None, None, []
        for h, (step, into) in zip(hidden, self._steps(needs, main), strict=True):
            part_x, part_weights, part = self._backward.backward(
                grad_TD, self.x_TD, h, *step, into=into
            )
            d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
            grads.append(part)
        return [_typed(d_x, self.x_TD), _typed(d_weights, self.weights_TK), *self._flat(grads)]

    def data_grads(
        self, grad_TD: Tensor, hidden: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None, tuple[HiddenGradients, ...]]:
        """Give the gradients of x and of the routing weights, and what `weight_grads` needs of every slice."""
        d_x, d_weights, kept = None, None, []
        for h, (step, _) in zip(
            hidden, self._steps([True] * len(self.differentiable), ()), strict=True
        ):
            part_x, part_weights, rows = self._backward.data_grads(grad_TD, self.x_TD, h, *step)
            d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
            kept.append(rows)
        return _typed(d_x, self.x_TD), _typed(d_weights, self.weights_TK), tuple(kept)

    def weight_grads(
        self, grad_TD: Tensor, kept: Sequence[HiddenGradients], main: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Give the gradients of the parameters, or add them to `main`."""
        steps = self._steps([True] * len(self.differentiable), main)
        return self._flat(
            [
                self._backward.weight_grads(grad_TD, self.x_TD, rows, *step, into=into)
                for rows, (step, into) in zip(kept, steps, strict=True)
            ]
        )

    def _flat(self, grads: Sequence[Experts]) -> list[Tensor | None]:
        b_in = [None if g.b_in_EGF is None else g.b_in_EGF.contiguous() for g in grads]
        weights = [g.w_in_EGFD for g in grads] + [g.w_out_EDF for g in grads]
        return [*weights, *b_in[: len(self.b_in)], *[grads[0].b_out_ED][: len(self.b_out)]]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum so far: the first part as it is, of wide type from the second on."""
    if total is None or part is None:
        return part if total is None else total
    return total.to(accumulate_dtype(total.dtype)).add_(part)


def _typed(total: Tensor | None, like: Tensor) -> Tensor | None:
    return None if total is None else total.to(like.dtype)
