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
from expertmesh.ops.experts.grouped_linear import grouped_linear
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

    def forward(self, x_RK: Tensor, offsets_E: Tensor, backend: str) -> Tensor:
        """(R, K) rows in the order of their experts -> (R, N), the addition to their products."""
        a, b = (factor.to(x_RK.dtype) for factor in self.factors())
        if self.shared:
            low_Rr = nn.functional.linear(x_RK, a[0])
            return nn.functional.linear(low_Rr, b[0] * self.scaling)
        low_Rr = grouped_linear(x_RK, a, offsets_E, backend=backend)
        return grouped_linear(low_Rr, b * self.scaling, offsets_E, backend=backend)

    @torch.no_grad()
    def add_to(self, w: Tensor) -> None:
        """Add s B A to a stack of matrices (E, ..., K), one expert at a time."""
        flat_ENK = w.flatten(1, -2)
        for expert in range(flat_ENK.shape[0]):
            at = 0 if self.shared else expert
            a, b = (
                factor[at].to(torch.promote_types(w.dtype, factor.dtype))
                for factor in (self.a, self.b)
            )
            total_NK = torch.addmm(flat_ENK[expert].to(a.dtype), b, a, alpha=self.scaling)
            flat_ENK[expert].copy_(total_NK)


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
        h_RN = grouped_linear(
            x_RD,
            w_in_EGFD.flatten(1, 2),
            offsets_E,
            b_EN=None if b_in_EGF is None else b_in_EGF.flatten(1),
            backend=backend,
        )
        if self.w_in is not None:
            h_RN = h_RN + self.w_in(x_RD, offsets_E, backend)
        a_RF = activate(h_RN.unflatten(1, (G, F)), activation)
        y_RD = grouped_linear(a_RF, w_out_EDF, offsets_E, b_EN=b_out_ED, backend=backend)
        if self.w_out is not None:
            y_RD = y_RD + self.w_out(a_RF, offsets_E, backend)
        s_R = weights_TK.reshape(-1).index_select(0, metadata.slot_of_row_N)
        y_RD = (y_RD * s_R[:, None]).to(y_RD.dtype)
        return combine(y_RD, metadata, weights_TK.shape[1], backend=backend)
