"""Low-rank adapters on the matrices of a module (LoRA: Hu et al. 2022): W + s B A, computed as x A^T B^T beside x W^T.

Neither W + s B A nor the gradient of W is ever materialised, so an adapter adds only its own products and memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.moe.init import init_normal_
from expertmesh.moe.token_dropout import AdapterDropout
from expertmesh.ops.experts.call import LowRank

TARGETS = ("weight", "w_in", "w_out")
"""Parameters of modules that can have an adapter: of a linear map, of experts and of dense feed-forward networks."""


class Adapter(nn.Module):
    """Factors of the adapter s B A on a matrix W (*rows, K) or a stack of matrices (E, *rows, K).

    Parameters: `a` (E, r, K) and `b` (E, *rows, r); without E for one matrix, or where all experts share it.
    """

    def __init__(
        self,
        shape: Sequence[int],  # shape of W
        *,
        num_experts: int | None,  # E, the first axis of W; None: W is one matrix
        rank: int,  # r
        scaling: float,  # s
        shared: bool = False,  # whether all experts share it
        drop: AdapterDropout | None = None,  # dropout of its input in training
        device: torch.device | str | None = None,  # device of the factors
        dtype: torch.dtype | None = None,  # type of the factors
    ) -> None:
        super().__init__()
        self.rank, self.scaling, self.num_experts = rank, scaling, num_experts
        self.drop = drop
        self.shared = shared or num_experts is None
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        *rows, columns = shape if num_experts is None else shape[1:]
        lead = () if self.shared else (shape[0],)
        self.a = nn.Parameter(torch.empty(*lead, rank, columns, **place))
        self.b = nn.Parameter(torch.empty(*lead, *rows, rank, **place))
        self.local: Callable[[str], Tensor] | None = None  # local part of a factor, by its name

    def factors(self) -> tuple[Tensor, Tensor]:
        """Local parts of A (e, r, K) and B (e, N, r) on this process, differentiable; e is 1 where one serves all."""
        a, b = (self.a, self.b) if self.local is None else map(self.local, "ab")
        if self.shared:
            a, b = a[None], b[None]
        return a, b.flatten(1, -2)

    def forward(self) -> LowRank:
        """The adapter as the experts' operators take it."""
        return LowRank(*self.factors(), self.scaling, self.shared, self.drop)

    def reset(self, seed: int, name: str) -> None:
        """Draw A from N(0, 1 / K) and set B to zero; the numbers depend on seed and name only."""
        std, per_expert = self.a.shape[-1] ** -0.5, not self.shared
        init_normal_(self.a, std=std, seed=seed, name=f"{name}.a", per_expert=per_expert)
        nn.init.zeros_(self.b)
        if self.drop is not None:
            self.drop.reset()

    def cut(self, axis: int) -> tuple[str, int]:
        """Factor and its axis that are cut where W is cut along an axis."""
        lead = self.num_experts is not None
        if axis == self.b.ndim - 1 + (lead and self.shared):
            return "a", self.a.ndim - 1
        return "b", axis - (lead and self.shared)

    @torch.no_grad()
    def add_to(self, w: Tensor) -> None:
        """Add s B A to W, one matrix at a time."""
        stack = w if self.num_experts is not None else w[None]
        add_low_rank(stack, *self.factors(), self.scaling)


def add_low_rank(w: Tensor, a_erK: Tensor, b_eNr: Tensor, scaling: float) -> None:
    """Add s B A to a stack of matrices (E, *rows, K) in place, one at a time; e is E, or 1 where one serves all."""
    for expert, own in enumerate(w):
        at = expert if len(a_erK) > 1 else 0
        a, b = (one[at].to(torch.promote_types(w.dtype, one.dtype)) for one in (a_erK, b_eNr))
        total_NK = torch.addmm(own.flatten(0, -2).to(a.dtype), b, a, alpha=scaling)
        own.copy_(total_NK.view(own.shape))


class ModuleAdapters(nn.Module):
    """Adapters of one module, by the names of the parameters in `TARGETS`."""

    weight: Adapter | None
    w_in: Adapter | None
    w_out: Adapter | None

    def __init__(self, adapters: Mapping[str, Adapter], *, froze_model: bool) -> None:
        """Hold the adapters, and whether the model was frozen for them."""
        super().__init__()
        self.froze_model = froze_model
        for name in TARGETS:
            setattr(self, name, adapters.get(name))

    def forward(self) -> tuple[LowRank | None, LowRank | None]:
        """Adapters on w_in and on w_out as the operators take them, each None if there is none."""
        on_in = None if self.w_in is None else self.w_in()
        return on_in, None if self.w_out is None else self.w_out()


def adapters_in(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Adapters of a model, by the names of the adapted parameters."""
    for path, module in model.named_modules():
        if isinstance(own := getattr(module, "adapters", None), ModuleAdapters):
            for leaf, one in own.named_children():
                assert isinstance(one, Adapter)
                yield f"{path}.{leaf}".removeprefix("."), one


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes as if it had no adapters."""
    found = [
        (module, own)
        for module in model.modules()
        if isinstance(own := getattr(module, "adapters", None), ModuleAdapters)
    ]
    try:
        for module, _ in found:
            module.adapters = None  # type: ignore[assignment]
        yield
    finally:
        for module, own in found:
            module.adapters = own


def refuse_adapters(model: nn.Module) -> None:
    """Raise ConfigError for a model with adapters, where its weights are cut, copied or saved without them."""
    if any(adapters_in(model)):
        raise ConfigError("model has adapters; merge them first, with expertmesh.lora.merge")


def reset_adapters(model: nn.Module, seed: int, prefix: str = "") -> None:
    """Reset all adapters of a model; `prefix` stands before their names, which the numbers depend on."""
    for name, one in adapters_in(model):
        one.reset(seed, prefix + name)
