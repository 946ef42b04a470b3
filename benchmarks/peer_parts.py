"""What the adapters of other layers share: the case, the routing that all do, and the weights that all have."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh import MoELayer


@dataclass(frozen=True)
class Case:
    """One shape: T tokens, D, F, E experts, K choices, activation, dtype, forward and backward or forward only, device."""

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
    """Normalised weights and ids, (T, K) each: softmax in FP32, as all contenders route."""
    weights_TK, ids_TK = (x_TD.float() @ router_ED.float().T).softmax(-1).topk(top_k)
    return weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK


def activate(h: Tensor, case: Case) -> Tensor:
    """SwiGLU or GELU of the last dimension."""
    if case.num_branches == 1:
        return F.gelu(h)
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


class OwnWeights(nn.Module):
    """A copy of our weights, router (E, D), w_in (E, G * F, D), w_out (E, D, F), and a layer made of them.

    Subclasses give `experts(x_TD, weights_TK, ids_TK)`, what is done once the choice is made; None where a package offers
    the layer as a whole only, and `forward` is then its own.
    """

    experts: Callable[[Tensor, Tensor, Tensor], Tensor] | None

    def __init__(self, layer: MoELayer, case: Case) -> None:
        super().__init__()
        self.case = case
        self.router = nn.Parameter(layer.router.proj.weight.detach().clone())
        self.w_in = nn.Parameter(layer.experts.w_in.detach().flatten(1, 2).clone())
        self.w_out = nn.Parameter(layer.experts.w_out.detach().clone())

    def take(self, router_ED: Tensor, w_in_EHD: Tensor, w_out_EDF: Tensor) -> None:
        """Use these tensors, without a copy, from now on; forget gradients."""
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
