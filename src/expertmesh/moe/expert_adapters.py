"""Low-rank adapters on grouped experts (LoRA: Hu et al. 2022): W + s B A, computed as x A^T B^T beside x W^T.

Neither W + s B A nor the gradient of W is ever made, so an adapted layer costs the adapters' own products and memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.ops.experts.call import LowRank

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

    def forward(self) -> LowRank:
        """What the experts' operators add to the matrices."""
        return LowRank(*self.factors(), self.scaling, self.shared)

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

    def forward(self) -> tuple[LowRank | None, LowRank | None]:
        """What the experts' operators add to w_in and to w_out; None: nothing."""
        on_in = None if self.w_in is None else self.w_in()
        return on_in, None if self.w_out is None else self.w_out()
