"""Forward of a transformers experts module, computed by our operators on its own tensors.

Known experts are one call of `moe_mlp` on views of the module's weights. For others (transposed or interleaved weights,
a gate of their own, a norm after the experts, low-rank adapters) the class's own functions run between our grouped
matmuls.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from expertmesh.functional import combine, grouped_linear, moe_mlp, permute, route_metadata
from expertmesh.integrations.transformers.peft_experts import PeftFactors, weight_and_adapters
from expertmesh.integrations.transformers.weighted_gate import weighted_gate
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.experts.adapted_linear import adapted_linear, low_rank
from expertmesh.ops.experts.weighted_activation import weighted_activation

_INNER: dict[Any, str] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    nn.ReLU: "relu",
    ReLUSquaredActivation: "relu2",
}
_GATED = {"silu": "swiglu", "relu": "reglu", "gelu": "geglu"}


class Stack(NamedTuple):
    """Matrices of all experts, their biases, and their adapters."""

    w: Tensor
    b_EN: Tensor | None
    adapters: tuple[PeftFactors, ...]
    transposed: bool

    def times(self, x_RK: Tensor, offsets_E: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix; the sum of a matrix and its adapters is never formed."""
        given: dict[str, Any] = {"transposed": self.transposed}
        if not self.adapters:
            return grouped_linear(x_RK, self.w, offsets_E, b_EN=self.b_EN, **given)
        (a_ErK, b_ENr, scaling), *others = (
            (lhs.mT, rhs.mT, scaling) if self.transposed else (rhs, lhs, scaling) for lhs, rhs, scaling in self.adapters
        )
        y_RN = adapted_linear(x_RK, self.w, offsets_E, a_ErK, b_ENr, scaling, bias_EN=self.b_EN, **given)
        for a_ErK, b_ENr, scaling in others:
            y_RN = y_RN + low_rank(x_RK, offsets_E, a_ErK, b_ENr, scaling)
        return y_RN


def forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts, as an experts implementation of transformers.

    Args:
        experts: a module whose class transformers decorated with `use_experts_implementation`.
        hidden_states: (T, D) tokens.
        top_k_index: (T, K) ids of experts; the number of the module's experts means no expert of this module.
        top_k_weights: (T, K) routing weights, of any floating-point dtype.

    Returns:
        (T, D), in the dtype of the tokens.
    """
    w_in = _stack(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    w_out = _stack(experts, "down_proj")
    metadata = route_metadata(top_k_index, w_out.w.shape[0])
    x_TD = hidden_states
    if autocast_dtype(x_TD.device) is None:
        x_TD = x_TD.to(w_in.w.dtype)
    activation = fused_activation(experts)
    if activation is not None and not w_in.adapters and not w_out.adapters:
        F = w_out.w.shape[2]
        y_TD = moe_mlp(
            x_TD,
            w_in.w.unflatten(1, (-1, F)),
            w_out.w,
            top_k_weights,
            metadata,
            activation=activation,
            b_in_EGF=None if w_in.b_EN is None else w_in.b_EN.unflatten(1, (-1, F)),
            b_out_ED=w_out.b_EN,
        )
        return y_TD.to(hidden_states.dtype)
    offsets_E = metadata.offsets_E
    s_R = top_k_weights.reshape(-1).index_select(0, metadata.slot_of_row_N)
    h_RH = w_in.times(permute(x_TD, metadata), offsets_E)
    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    if _has_norm(experts):
        y_RD = experts.post_expert_norm(w_out.times(gate(h_RH), offsets_E))
        y_RD = (y_RD * s_R[:, None]).to(y_RD.dtype)
        return combine(y_RD, metadata, top_k_index.shape[1]).to(hidden_states.dtype)
    # the narrower side of the second product is weighted, and of its biases only their sum
    if activation is not None:
        a_RF = weighted_activation(h_RH, s_R, activation=activation)
    else:
        a_RF = weighted_gate(gate, h_RH, s_R)
    y_RD = w_out._replace(b_EN=None).times(a_RF, offsets_E)
    y_TD = combine(y_RD, metadata, top_k_index.shape[1])
    if w_out.b_EN is not None:
        y_TD = y_TD + _sum_of_biases(w_out.b_EN, top_k_index, top_k_weights)
    return y_TD.to(hidden_states.dtype)


def _sum_of_biases(b_ED: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(T, D) weighted sum of the biases of a token's experts, in the wider dtype of both."""
    (T, _), E = top_k_index.shape, len(b_ED)
    wide = torch.promote_types(b_ED.dtype, top_k_weights.dtype)
    s_TE = top_k_weights.new_zeros(T, E + 1).scatter_add(1, top_k_index.to(torch.int64), top_k_weights)[:, :E]
    return s_TE.to(wide) @ b_ED.to(wide)


def fused_activation(experts: Any) -> str | None:
    """Name of the `moe_mlp` activation that computes these experts; None: unknown experts.

    Experts are recognized by the class's gate function and activation class, not by the module's class name.
    """
    if experts.is_transposed or _has_norm(experts):
        return None
    act_fn = getattr(experts, "act_fn", None)
    inner = _INNER.get(type(act_fn))
    if isinstance(act_fn, GELUActivation) and act_fn.act is nn.functional.gelu:
        inner = "gelu"
    if inner is None or not experts.has_gate:
        return inner
    if not experts.is_concatenated or type(experts)._apply_gate is not _default_apply_gate:
        return None
    return _GATED.get(inner)


def _stack(experts: Any, name: str) -> Stack:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    whole, adapters = weight_and_adapters(experts, name)
    return Stack(whole, bias, adapters, experts.is_transposed)


def _has_norm(experts: Any) -> bool:
    """Whether a norm follows the experts; older versions of transformers lack the attribute and the norm."""
    return bool(getattr(experts, "has_post_expert_norm", False))
