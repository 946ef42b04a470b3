"""The experts' steps on either backend, with weights that may come as slices along F.

y = act(x W_in^T) W_out^T is a sum over the hidden units, so slices of F are experts of their own whose results add
up. Nothing is concatenated: gathered shards are used where they lie. Results of the slices, (T, D) each, are added in
FP32 (FP64 for FP64) in the order of the slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from torch import Tensor

from expertmesh.ops.cpu import backward as expert_loop_backward
from expertmesh.ops.cpu import forward as expert_loop
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.expert_types import Experts, HiddenGradients, SliceNeeds
from expertmesh.ops.experts import triton_backend as moe_mlp_triton
from expertmesh.ops.route_metadata import RouteMetadata


@dataclass(frozen=True)
class ExpertsCall:
    """One call of the experts.

    Attributes:
        x_TD: (T, D).
        slices: the weights, one entry per slice of F; only the first has b_out.
        weights_TK: (T, K) routing weights.
        maps: from `route_metadata`.
        backend: "torch" or "triton".
    """

    x_TD: Tensor
    slices: tuple[Experts, ...]
    weights_TK: Tensor
    maps: RouteMetadata
    backend: str

    def _module(self, *, backward: bool) -> ModuleType:
        if self.backend == "triton":
            return moe_mlp_triton
        return expert_loop_backward if backward else expert_loop

    def forward(self, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
        """Give y (T, D) and H (R, G * F_i) of every slice, without rows unless save_h."""
        module, total, hidden = self._module(backward=False), None, []
        for experts in self.slices:
            y, h = module.forward(self.x_TD, experts, self.weights_TK, self.maps, save_h=save_h)
            total = _added(total, y)
            hidden.append(h)
        assert total is not None
        return total.to(self.x_TD.dtype), hidden

    def backward(
        self,
        grad_TD: Tensor,
        hidden: Sequence[Tensor],
        needs: SliceNeeds,
        *,
        into: Sequence[Experts] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, list[Experts]]:
        """Give the gradients of x, of the routing weights and of every slice, or add the latter to `into`."""
        module, d_x, d_weights, grads = self._module(backward=True), None, None, []
        for i, experts in enumerate(self.slices):
            shared = (experts, self.weights_TK, self.maps, needs.of(i))
            target = None if into is None else into[i]
            part_x, part_weights, part = module.backward(
                grad_TD, self.x_TD, hidden[i], *shared, into=target
            )
            d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
            grads.append(part)
        return _typed(d_x, self.x_TD), _typed(d_weights, self.weights_TK), grads

    def data_grads(
        self, grad_TD: Tensor, hidden: Sequence[Tensor], needs: SliceNeeds
    ) -> tuple[Tensor | None, Tensor | None, list[HiddenGradients]]:
        """Give the gradients of x and of the routing weights, and what `weight_grads` needs of every slice."""
        module, d_x, d_weights, kept = self._module(backward=True), None, None, []
        for i, experts in enumerate(self.slices):
            shared = (experts, self.weights_TK, self.maps, needs.of(i))
            part_x, part_weights, rows = module.data_grads(grad_TD, self.x_TD, hidden[i], *shared)
            d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
            kept.append(rows)
        return _typed(d_x, self.x_TD), _typed(d_weights, self.weights_TK), kept

    def weight_grads(
        self,
        grad_TD: Tensor,
        kept: Sequence[HiddenGradients],
        needs: SliceNeeds,
        *,
        into: Sequence[Experts] | None = None,
    ) -> list[Experts]:
        """Give the gradients of every slice, or add them to `into`."""
        module, grads = self._module(backward=True), []
        for i, experts in enumerate(self.slices):
            shared = (experts, self.weights_TK, self.maps, needs.of(i))
            target = None if into is None else into[i]
            grads.append(module.weight_grads(grad_TD, self.x_TD, kept[i], *shared, into=target))
        return grads


def make_slices(
    w_in: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_out_ED: Tensor | None,
    activation: str,
) -> tuple[Experts, ...]:
    """The slices of a call from lists of their tensors; b_in may be empty."""
    biases: list[Tensor | None] = [*b_in] if b_in else [None] * len(w_in)
    slices = [
        Experts(first, second, bias, None, activation)
        for first, second, bias in zip(w_in, w_out, biases, strict=True)
    ]
    return replace(slices[0], b_out_ED=b_out_ED), *slices[1:]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum so far: the first part as it is, of wide type from the second on."""
    if total is None or part is None:
        return part if total is None else total
    wide = accumulate_dtype(total.dtype)
    total = total if total.dtype == wide else total.to(wide)
    return total.add_(part)


def _typed(total: Tensor | None, like: Tensor) -> Tensor | None:
    return None if total is None else total.to(like.dtype)
