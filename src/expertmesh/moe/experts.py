"""The routed experts (grouped) and the dense MLPs beside them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.moe.init import init_normal_

GATED = frozenset({"swiglu", "geglu", "reglu"})


def activate(h: Tensor, activation: str) -> Tensor:
    """(..., G, F) pre-activations -> (..., F)."""
    if activation in GATED:
        gate, up = h.unbind(-2)
        fn = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}[activation]
        return fn(gate) * up
    h = h.squeeze(-2)
    if activation == "gelu":
        return F.gelu(h)
    if activation == "silu":
        return F.silu(h)
    return F.relu(h) if activation == "relu" else F.relu(h).square()


class DenseMLP(nn.Module):
    """Shared experts or the residual MLP: w_in (G, F, D), w_out (D, F)."""

    def __init__(self, *, dim: int, hidden_dim: int, activation: str, bias: bool, device=None, dtype=None) -> None:
        super().__init__()
        groups = 2 if activation in GATED else 1
        kw = {"device": device, "dtype": dtype}
        self.activation = activation
        self.w_in = nn.Parameter(torch.empty(groups, hidden_dim, dim, **kw))
        self.w_out = nn.Parameter(torch.empty(dim, hidden_dim, **kw))
        self.b_in = nn.Parameter(torch.zeros(groups, hidden_dim, **kw)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(dim, **kw)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        b_in = None if self.b_in is None else self.b_in.flatten()
        h = F.linear(x_TD, self.w_in.flatten(0, 1), b_in).unflatten(-1, self.w_in.shape[:2])
        return F.linear(activate(h, self.activation), self.w_out, self.b_out)


class GroupedExperts(nn.Module):
    """E experts in two tensors: w_in (E, G, F, D), w_out (E, D, F)."""

    def __init__(self, *, num_experts: int, dim: int, hidden_dim: int, activation: str, bias: bool, device=None, dtype=None) -> None:
        super().__init__()
        groups = 2 if activation in GATED else 1
        kw = {"device": device, "dtype": dtype}
        self.activation = activation
        self.w_in = nn.Parameter(torch.empty(num_experts, groups, hidden_dim, dim, **kw))
        self.w_out = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, **kw))
        self.b_in = nn.Parameter(torch.zeros(num_experts, groups, hidden_dim, **kw)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(num_experts, dim, **kw)) if bias else None

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs; ids equal to E are skipped."""
        y = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
        for e in range(self.w_in.shape[0]):
            t, k = (ids_TK == e).nonzero(as_tuple=True)
            b_in = None if self.b_in is None else self.b_in[e].flatten()
            h = F.linear(x_TD[t], self.w_in[e].flatten(0, 1), b_in).unflatten(-1, self.w_in.shape[1:3])
            out = F.linear(activate(h, self.activation), self.w_out[e], None if self.b_out is None else self.b_out[e])
            y = y.index_add(0, t, out.to(y.dtype) * weights_TK[t, k, None])
        return y.to(x_TD.dtype)
