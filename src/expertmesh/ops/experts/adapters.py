"""The experts with low-rank adapters: our grouped products with the adapters' own between them.

Neither W + s B A nor the gradient of W is made, so an adapted layer costs the adapters' own products and memory.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import activate
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.grouped_linear import grouped_linear
from expertmesh.ops.experts.weighted_activation import weighted_activation
from expertmesh.ops.permute import combine, permute


def forward(call: ExpertsCall, buffers: list[Tensor]) -> Tensor:
    """What `moe_mlp` computes, with the adapters: (T, D), differentiable; buffers say nothing.

    Raises:
        ConfigError: there are adapters of another number of experts.
    """
    metadata, backend = call.maps, call.backend
    assert metadata is not None and call.adapters is not None
    for adapter in call.adapters:
        if adapter is not None and not adapter.is_shared:
            _check(adapter, call.experts.num_experts)
    one = call.experts.joined(call.x_TD.dtype)
    x_RD = permute(call.x_TD, metadata, backend=backend)
    how: dict[str, Any] = {"offsets_E": metadata.offsets_E, "backend": backend}
    on_in, on_out = call.adapters
    bias = None if one.b_in_EGF is None else one.b_in_EGF.flatten(1)
    h_RN = _times(on_in, x_RD, one.w_in_EGFD.flatten(1, 2), bias, **how)
    s_R = call.weights_TK.reshape(-1).index_select(0, metadata.slot_of_row_N)
    if one.b_out_ED is None:
        a_RF = weighted_activation(h_RN, s_R, activation=one.activation)
        y_RD = _times(on_out, a_RF, one.w_out_EDF, None, **how)
    else:
        _, G, width, _ = one.shape
        a_RF = activate(h_RN.unflatten(1, (G, width)), one.activation)
        y_RD = _times(on_out, a_RF, one.w_out_EDF, one.b_out_ED, **how)
        y_RD = (y_RD * s_R[:, None]).to(y_RD.dtype)
    return combine(y_RD, metadata, call.weights_TK.shape[1], backend=backend)


def _check(adapter: LowRank, num_experts: int) -> None:
    here = adapter.a_ErK.shape[0]
    if here != num_experts:
        raise ConfigError(
            f"adapters of {here} experts and weights of {num_experts}: weights are gathered, and adapters are not; "
            "leave route_degree out, so that tokens travel to all ranks"
        )


def _times(
    adapter: LowRank | None,
    x_RK: Tensor,
    w_ENK: Tensor,
    b_EN: Tensor | None,
    *,
    offsets_E: Tensor,
    backend: str,
) -> Tensor:
    """(R, K) rows in the order of their experts -> (R, N), their products with the adapted matrices."""
    if adapter is None:
        return grouped_linear(x_RK, w_ENK, offsets_E, b_EN=b_EN, backend=backend)
    a, b = (factor.to(x_RK.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    if not adapter.is_shared:
        return adapted_linear(
            x_RK, w_ENK, offsets_E, a, b, adapter.scaling, bias_EN=b_EN, backend=backend
        )
    y_RN = grouped_linear(x_RK, w_ENK, offsets_E, b_EN=b_EN, backend=backend)
    low_Rr = F.linear(x_RK, a[0])
    return y_RN + F.linear(low_Rr, b[0] * adapter.scaling)
