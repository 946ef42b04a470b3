"""Activations of the experts: names, forward, backward.

A gated activation (G = 2) is act(gate) * up with gate = h[:, 0] and up = h[:, 1]; a plain one (G = 1) is act(h).
"clamped_swiglu" (gpt-oss) clamps both first and adds 1 to up: with g = min(gate, 7) it is g * sigmoid(1.702 g) *
(clamp(up, -7, 7) + 1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.config.values import other_choice

_INNER = {
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "clamped_swiglu": "clamped_silu",
}
_GATED = frozenset({"swiglu", "geglu", "reglu", "clamped_swiglu"})


def num_branches(activation: str) -> int:
    """Return G, the number of branches of `w_in`: 2 for gated activations, else 1."""
    if activation not in _INNER:
        raise other_choice("activation", activation, _INNER)
    return 2 if activation in _GATED else 1


def inner_name(activation: str) -> str:
    """Return the name of the point-wise function inside an activation: silu, gelu, relu, relu2 or clamped_silu."""
    return _INNER[activation]


def pointwise(h: Tensor, inner: str) -> Tensor:
    """Apply the point-wise function; differentiable by autograd. GELU is the exact one (erf)."""
    if inner == "silu":
        return F.silu(h)
    if inner == "gelu":
        return F.gelu(h)
    if inner == "relu":
        return F.relu(h)
    if inner == "clamped_silu":
        h = h.clamp(max=CLAMP_LIMIT)
        return h * torch.sigmoid(h * CLAMP_SLOPE)
    return F.relu(h).square()


def pointwise_(h: Tensor, inner: str) -> Tensor:
    """Apply `pointwise` in place; no autograd."""
    if inner == "silu":
        return F.silu(h, inplace=True)
    if inner == "gelu":
        return torch.ops.aten.gelu_(h)
    if inner == "clamped_silu":
        h.clamp_(max=CLAMP_LIMIT)
        return h.mul_(torch.sigmoid(h * CLAMP_SLOPE))
    h.clamp_(min=0)
    return h.square_() if inner == "relu2" else h


def pointwise_backward(grad: Tensor, h: Tensor, inner: str) -> Tensor:
    """Compute grad times the derivative of the point-wise function at h; no autograd."""
    if inner == "silu":
        return torch.ops.aten.silu_backward(grad, h)
    if inner == "gelu":
        return torch.ops.aten.gelu_backward(grad, h)
    if inner == "relu":
        return torch.ops.aten.threshold_backward(grad, h, 0)
    if inner == "clamped_silu":
        small = h.clamp(max=CLAMP_LIMIT)
        share = torch.sigmoid(small * CLAMP_SLOPE)
        slope = share * (1 + CLAMP_SLOPE * small * (1 - share))
        return grad * slope * (h <= CLAMP_LIMIT)
    return F.relu(h).mul_(2).mul_(grad)


def second_branch(up: Tensor, inner: str) -> Tensor:
    """Factor of the point-wise function in a gated activation: up itself; clamp(up) + 1 for clamped_silu."""
    if inner != "clamped_silu":
        return up
    return up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1


def second_branch_backward(grad: Tensor, up: Tensor, inner: str) -> Tensor:
    """Compute grad times the derivative of `second_branch` at up; no autograd."""
    return grad if inner != "clamped_silu" else grad * (up.abs() <= CLAMP_LIMIT)


def activate(h_RGF: Tensor, activation: str) -> Tensor:
    """Apply an activation to pre-activation rows (R, G, F) -> (R, F); differentiable by autograd."""
    inner = _INNER[activation]
    if activation in _GATED:
        return pointwise(h_RGF[:, 0], inner) * second_branch(h_RGF[:, 1], inner)
    return pointwise(h_RGF[:, 0], inner)
