"""Low-rank adapters on grouped experts (LoRA: Hu et al. 2022): W + s B A, computed as x A^T B^T beside x W^T.

Neither W + s B A nor the gradient of W is ever made, so an adapted layer costs the adapters' own products and memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import activate
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.grouped_linear import grouped_linear
from expertmesh.ops.experts.weighted_activation import weighted_activation
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata

TARGETS = ("w_in", "w_out")
"""The parameters of experts that can have an adapter."""


class Adapter(nn.Module):
    """The two factors of one adapter.

    Parameters: `a` (e, r, columns) and `b` (e, rows, r), where e is E, or 1 where all experts share it.

    Args:
        num_experts: E.
        rows: N of W (E, N, K).
        columns: K.
        rank: r.
        scaling: s.
        shared: one adapter for all experts.
        device: the device of the factors.
        dtype: the type of the factors.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        rows: int,
        columns: int,
        rank: int,
        scaling: float,
        shared: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.scaling, self.shared, self.num_experts = rank, scaling, shared, num_experts
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        e = 1 if shared else num_experts
        self.a = nn.Parameter(torch.empty(e, rank, columns, **place))
        self.b = nn.Parameter(torch.empty(e, rows, rank, **place))
        self.local: Callable[[Tensor], Tensor] | None = None  # where they are spread over processes

    def factors(self) -> tuple[Tensor, Tensor]:
        """What this process holds of both, differentiable."""
        if self.local is None:
            return self.a, self.b
        return self.local(self.a), self.local(self.b)

    def forward(
        self, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, b_EN: Tensor | None, backend: str
    ) -> Tensor:
        """(R, K) rows in the order of their experts -> (R, N), their products with the adapted matrices."""
        a, b = (factor.to(x_RK.dtype) for factor in self.factors())
        if not self.shared:
            return adapted_linear(
                x_RK, w_ENK, offsets_E, a, b, self.scaling, bias_EN=b_EN, backend=backend
            )
        y_RN = grouped_linear(x_RK, w_ENK, offsets_E, b_EN=b_EN, backend=backend)
        low_Rr = nn.functional.linear(x_RK, a[0])
        return y_RN + nn.functional.linear(low_Rr, b[0] * self.scaling)

    @torch.no_grad()
    def add_to(self, w: Tensor) -> None:
        """Add s B A to a stack of matrices (E, ..., K), one expert at a time."""
        for expert, own in enumerate(w):
            at = 0 if self.shared else expert
            a, b = (
                factor[at].to(torch.promote_types(w.dtype, factor.dtype))
                for factor in (self.a, self.b)
            )
            total_NK = torch.addmm(own.flatten(0, -2).to(a.dtype), b, a, alpha=self.scaling)
            own.copy_(total_NK.view(own.shape))


class ExpertAdapters(nn.Module):
    """The adapters of one layer's experts: `w_in`, `w_out`, or one of them."""

    def __init__(self, adapters: dict[str, Adapter]) -> None:
        """Hold the adapters by the names of the parameters that they are on."""
        super().__init__()
        self.w_in: Adapter | None = adapters.get("w_in")
        self.w_out: Adapter | None = adapters.get("w_out")

    def forward(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        metadata: RouteMetadata,
        *,
        w_in_EGFD: Tensor,
        w_out_EDF: Tensor,
        b_in_EGF: Tensor | None,
        b_out_ED: Tensor | None,
        activation: str,
        backend: str,
    ) -> Tensor:
        """What `moe_mlp` computes, with the adapters.

        Returns:
            (T, D) in the type of x, or autocast's.
        """
        for adapter in self.children():
            assert isinstance(adapter, Adapter)
            here = adapter.factors()[0].shape[0]
            if not adapter.shared and here != w_in_EGFD.shape[0]:
                raise ConfigError(
                    f"adapters of {here} experts and weights of {w_in_EGFD.shape[0]}: weights are gathered, and adapters are not; "
                    "leave route_degree out, so that tokens travel to all ranks"
                )
        cast = autocast_dtype(x_TD.device)
        if cast is not None and x_TD.dtype != torch.float64:
            x_TD = x_TD.to(cast)
        offsets_E, (G, F) = metadata.offsets_E, w_in_EGFD.shape[1:3]
        x_RD = permute(x_TD, metadata, backend=backend)

        def times(adapter: Adapter | None, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            if adapter is None:
                return grouped_linear(x, w, offsets_E, b_EN=bias, backend=backend)
            y: Tensor = adapter(x, w, offsets_E, bias, backend)
            return y

        bias = None if b_in_EGF is None else b_in_EGF.flatten(1)
        h_RN = times(self.w_in, x_RD, w_in_EGFD.flatten(1, 2), bias)
        s_R = weights_TK.reshape(-1).index_select(0, metadata.slot_of_row_N)
        if b_out_ED is None:
            a_RF = weighted_activation(h_RN, s_R, activation=activation)
            y_RD = times(self.w_out, a_RF, w_out_EDF, None)
        else:
            a_RF = activate(h_RN.unflatten(1, (G, F)), activation)
            y_RD = times(self.w_out, a_RF, w_out_EDF, b_out_ED)
            y_RD = (y_RD * s_R[:, None]).to(y_RD.dtype)
        return combine(y_RD, metadata, weights_TK.shape[1], backend=backend)
