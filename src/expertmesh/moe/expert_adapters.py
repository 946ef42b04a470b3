"""Low-rank adapters on grouped experts (LoRA: Hu et al. 2022): W + s B A, computed as x A^T B^T beside x W^T.

Neither W + s B A nor the gradient of W is ever materialised, so an adapter adds only its own products and memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.ops.experts.call import LowRank

TARGETS = ("w_in", "w_out")
"""Parameters of experts that can have an adapter."""


class Adapter(nn.Module):
    """Factors of the adapter s B A on one stack of matrices W (E, rows, columns).

    Parameters: `a` (e, r, columns) and `b` (e, rows, r), where e is E, or 1 where all experts share it.
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
        self.local: Callable[[Tensor], Tensor] | None = None  # local part of a factor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Local parts of A and B on this process, differentiable."""
        if self.local is None:
            return self.a, self.b
        return self.local(self.a), self.local(self.b)

    def forward(self) -> LowRank:
        """The adapter as the experts' operators take it."""
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
    """Adapters of one layer's experts, on `w_in`, `w_out` or both."""

    def __init__(self, adapters: dict[str, Adapter], *, froze_model: bool) -> None:
        """Hold the adapters, by the names of the adapted parameters, and whether the model was frozen for them."""
        super().__init__()
        self.froze_model = froze_model
        self.w_in: Adapter | None = adapters.get("w_in")
        self.w_out: Adapter | None = adapters.get("w_out")

    def forward(self) -> tuple[LowRank | None, LowRank | None]:
        """Adapters on w_in and on w_out as the operators take them, each None if there is none."""
        on_in = None if self.w_in is None else self.w_in()
        return on_in, None if self.w_out is None else self.w_out()
