"""What the experts' operator and its backends hand one another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Tensor | Sequence[Tensor]
"""A tensor, or its slices along F."""


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of the experts' weights, or buffers that they are added to (main gradients).

    Attributes:
        w_in: (E, G, F, D), or a tuple of slices as the weights were given; None: not wanted.
        w_out: (E, D, F), or a tuple of slices; None: not wanted.
        b_in: (E, G, F), or a tuple of slices; None: no bias, or not wanted.
        b_out: (E, D); None: no bias, or not wanted.

    Example:
        >>> w_in_EGFD, w_out_EDF = torch.randn(4, 2, 16, 8, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
        >>> buffers = WeightGradients(torch.zeros(4, 2, 16, 8), torch.zeros(4, 8, 16))
        >>> maps, weights_TK = route_metadata(torch.randint(0, 4, (5, 2)), 4), torch.ones(5, 2)
        >>> y_TD = moe_mlp(torch.randn(5, 8), w_in_EGFD, w_out_EDF, weights_TK, maps, activation="swiglu", main_grads=buffers)
        >>> y_TD.sum().backward()
        >>> w_in_EGFD.grad is None, bool(buffers.w_in.any())
        (True, True)
    """

    w_in: Tensor | tuple[Tensor, ...] | None
    w_out: Tensor | tuple[Tensor, ...] | None
    b_in: Tensor | tuple[Tensor, ...] | None = None
    b_out: Tensor | None = None


@dataclass(frozen=True)
class Experts:
    """The weights of all experts and their activation, as `moe_mlp` takes them."""

    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    activation: str

    def w_in(self, e: int, dtype: torch.dtype) -> Tensor:
        """First weight of one expert as (G * F, D)."""
        w = self.w_in_EGFD[e].flatten(0, 1)
        return w if w.dtype == dtype else w.to(dtype)

    def w_out(self, e: int, dtype: torch.dtype) -> Tensor:
        """Second weight of one expert, (D, F)."""
        w = self.w_out_EDF[e]
        return w if w.dtype == dtype else w.to(dtype)

    def w_ins(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """First weights of some experts, with as few calls as can be, and copies (if any) one at a time."""
        if self.w_in_EGFD.dtype != dtype or not self.w_in_EGFD.is_contiguous():
            return (self.w_in(e, dtype) for e in experts)
        return selected(self.w_in_EGFD.flatten(1, 2), experts)

    def w_outs(self, experts: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
        """Second weights of some experts, as `w_ins`."""
        if self.w_out_EDF.dtype != dtype:
            return (self.w_out(e, dtype) for e in experts)
        return selected(self.w_out_EDF, experts)

    @property
    def are_narrow(self) -> bool:
        """Whether a weight is so small that the CPU library's code for a new shape costs more than its products."""
        _, G, F, D = self.w_in_EGFD.shape
        return G * F * D <= 1 << 16


def selected(values: Tensor, indices: Sequence[int]) -> Iterator[Tensor]:
    """Entries of the first dimension; a view of all of them is one call, but costs the host half of a call per entry."""
    if 2 * len(indices) > values.shape[0]:
        return map(values.unbind().__getitem__, indices)
    return (values.select(0, i) for i in indices)


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w_in: bool
    w_out: bool
    weights: bool
    b_in: bool
    b_out: bool


@dataclass(frozen=True)
class HiddenGradients:
    """What `weight_grads` needs of `data_grads`; its layout is the backend's own.

    Attributes:
        a_RF: s * act(H), or None where no gradient of w_out is wanted.
        d_h_RH: gradient of H, or None where nothing before H has a gradient.
    """

    a_RF: Tensor | None
    d_h_RH: Tensor | None
