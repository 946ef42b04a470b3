"""What the adapters of other layers share: the case, the routing that all do, and the weights that all have."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh import MoELayer


@dataclass(frozen=True)
class Case:
    """One shape: T tokens, D, F, E experts, K choices, activation, dtype, forward and backward or forward only,
    device."""

    num_tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    activation: str
    dtype: torch.dtype
    training: bool = True
    device: str = "cpu"

    @property
    def num_branches(self) -> int:
        return 2 if self.activation == "swiglu" else 1


def choose(x_TD: Tensor, router_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Normalised weights and ids, (T, K) each: softmax in FP32 (FP64 for FP64), as all contenders route."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    weights_TK, ids_TK = (x_TD.to(wide) @ router_ED.to(wide).T).softmax(-1).topk(top_k)
    return weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK


def activate(h: Tensor, case: Case) -> Tensor:
    """SwiGLU or GELU of the last dimension."""
    if case.num_branches == 1:
        return F.gelu(h)
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def through_einsums(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    experts: Callable[[Tensor], Tensor],
) -> Tensor:
    """Dispatch and combine as dense einsums over (token, expert, place), as in GShard and fairseq.

    Args:
        x_TD: tokens.
        ids_TK: their experts; the id E is no expert.
        weights_TK: routing weights.
        num_experts: E.
        experts: from rows (E, C, D) to results of this shape; C is the rows of the fullest expert, so nothing is padded
            beyond that.
    """
    # "no expert" has a column of its own, which is left out
    chosen_TKE = F.one_hot(ids_TK, num_experts + 1)[..., :num_experts]
    place_TKE = (chosen_TKE.flatten(0, 1).cumsum(0) - 1).view_as(chosen_TKE)
    place_TK = (place_TKE * chosen_TKE).sum(-1)
    capacity = max(int(chosen_TKE.sum((0, 1)).max()), 1)
    weights_TKE = (weights_TK[..., None] * chosen_TKE).to(x_TD.dtype)
    places_TKC = F.one_hot(place_TK, capacity).to(x_TD.dtype)
    combine_TEC = torch.einsum("tke,tkc->tec", weights_TKE, places_TKC)
    dispatch_TEC = (combine_TEC != 0).to(x_TD.dtype)
    rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
    return torch.einsum("tec,ecd->td", combine_TEC, experts(rows_ECD))


class OwnWeights(nn.Module):
    """A layer made of our weights: router (E, D), w_in (E, G * F, D), w_out (E, D, F), copied from our layer.

    Subclasses give `experts(x_TD, weights_TK, ids_TK)`, what is done once the choice is made; None where a package
    offers the layer as a whole only, and `forward` is then its own. They make what they need in `build`, and put the
    weights there in `take`.
    """

    experts: Callable[[Tensor, Tensor, Tensor], Tensor] | None

    def __init__(self, layer: MoELayer, case: Case, **options: Any) -> None:
        super().__init__()
        self.case = case
        self.build(**options)
        weights = (layer.router.proj.weight, layer.experts.w_in.flatten(1, 2), layer.experts.w_out)
        self.take(*(w.detach().clone() for w in weights))

    def build(self) -> None:
        """Make the package's own modules."""

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        """Use these tensors, without a copy where the layout allows, from now on; forget gradients."""
        self.router = nn.Parameter(router_ED)
        self.w_in, self.w_out = nn.Parameter(w_in_EHD), nn.Parameter(w_out_EDF)

    def routing(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids (T, K) that this layer routes by."""
        return choose(x_TD, self.router, self.case.top_k)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.experts(x_TD, *self.routing(x_TD))

    def weight_grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of w_in (E, G * F, D) and w_out (E, D, F) after a backward."""
        return self.w_in.grad, self.w_out.grad


def absent(module: str) -> str | None:
    """Why a package cannot be used, or None."""
    return None if importlib.util.find_spec(module) else "not installed"
