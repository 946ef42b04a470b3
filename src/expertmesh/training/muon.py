"""Muon for the matrices of a model, one expert at a time, and AdamW for all other parameters."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.matrices import on_whole_matrices, own_part
from expertmesh.training.fused import Halves, on_halves, shape_of_one
from expertmesh.training.low_bit_adamw import (
    MUON_KEYS,
    Compact,
    LowBitAdamW,
    begin_step,
    fused_adamw,
    grow_scales,
    keep_dtypes,
    loss_of,
    words_of,
)
from expertmesh.training.moment_types import read_moment, write_moment
from expertmesh.training.stochastic_rounding import Words
from expertmesh.training.workspace import Workspace, Workspaces

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the quintic iteration (Jordan et al. 2024), as in `torch.optim.Muon`."""
STEPS = 5
"""Number of iterations."""
EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by."""
(_MOMENT,) = MUON_KEYS
WIDE = 1.5
"""Ratio of width to height from which matrices are iterated by their Gram matrices."""


def orthogonalized(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Orthogonalize each matrix, so that its singular values are near 1, by five Newton-Schulz steps (Jordan et al.
    2024).

    With X = U S V^T the result is U p(p(...S / |S|)) V^T, p(s) = a s + b s^3 + c s^5. Its singular values are in 0.7 to
    1.2, except where X's were tiny.

    Args:
        x: (..., A, B); a matrix of zeros gives zeros.
        dtype: compute dtype, unless x is FP64; None: x's dtype (at least FP32), on a GPU BF16.

    Returns:
        (..., A, B) in x's dtype. Does not synchronize.
    """
    a, b, c = COEFFICIENTS
    if dtype is None:
        dtype = torch.bfloat16 if x.is_cuda else accumulate_dtype(x.dtype)
    dtype = torch.float64 if x.dtype == torch.float64 else dtype
    y = x.to(dtype).reshape(-1, *x.shape[-2:])
    is_tall = y.shape[1] > y.shape[2]
    y = y.mT if is_tall else y
    y = y / torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True).clamp_min(EPS)
    # in BF16 small singular values would be lost in the Gram matrix, which squares them
    if dtype != torch.bfloat16 and y.shape[2] >= WIDE * y.shape[1]:
        y = _by_gram_matrix(y)
    else:
        for _ in range(STEPS):
            gram = y @ y.mT
            y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).reshape(x.shape).to(x.dtype)


def _by_gram_matrix(y: Tensor) -> Tensor:
    """Newton-Schulz iteration on the Gram matrix, with two matmuls over y's whole width instead of ten.

    Every iterate of Y (..., A, B) is Q Y for a polynomial Q of G = Y Y^T, so with P = a + b G + c G^2 the next Q is P Q
    and the next G is P G P, all of them (A, A).
    """
    a, b, c = COEFFICIENTS
    gram = y @ y.mT
    product: Tensor | None = None
    for step in range(STEPS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        product = polynomial if product is None else polynomial @ product
        if step + 1 < STEPS:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    return product @ y


class Muon(torch.optim.Optimizer):
    """Optimizer with orthogonalized momentum (Jordan et al. 2024), at AdamW's update size of 0.2 (Liu et al. 2025, eq.
    4).

    In groups with `is_matrix`, each matrix W (..., A, B) of a parameter (for example of one expert) is updated by

        M = m M + (1 - m) G;  O = orthogonalized((1 - m) G + m M);  W = (1 - lr decay) W - 0.2 lr sqrt(max(A, B)) O.

    This is `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw", which supports single matrices on one process only.
    Other groups use AdamW. Learning rate and decay tuned for AdamW suit both.

    Args:
        groups: groups of `params` with `is_matrix` and `weight_decay`. Groups of matrices may have `halves`: for each
            parameter its fused layout (`fused_halves`) or None. With a `state_dtype` other than "float32", `params` are
            named.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,  # learning rate of all groups
        momentum: float,  # m
        betas: tuple[float, float],  # betas of AdamW
        eps: float,  # epsilon of AdamW
        dtype: torch.dtype | None = None,  # dtype of the orthogonalization, see `orthogonalized`
    ) -> None:
        self.dtype = dtype
        defaults = {"lr": lr, "is_matrix": False, "momentum": momentum, "state_dtype": "float32"}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            if not group["is_matrix"]:
                group.update(betas=betas, eps=eps)
        self._adamw = self._for_others()

    def _for_others(self) -> torch.optim.Optimizer | None:
        """AdamW of the other groups, which shares groups and state so that both are saved and scheduled once."""
        others = [group for group in self.param_groups if not group["is_matrix"]]
        if all(group["state_dtype"] == "float32" for group in others):
            return fused_adamw(self, others)
        return LowBitAdamW(others).sharing(self.state)

    def __getstate__(self) -> dict[str, Any]:
        """State for copying and pickling."""
        return {**super().__getstate__(), "dtype": self.dtype}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, keeping the dtypes of moments; torch's version casts them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; `load_state_dict` calls this with new groups and state."""
        super().__setstate__(state)
        self._adamw = self._for_others()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; every rank must call."""
        loss = loss_of(closure)
        matrices = [group for group in self.param_groups if group["is_matrix"]]
        compact = [group for group in matrices if group["state_dtype"] != "float32"]
        found = begin_step(self, compact, _MOMENT)
        grow_scales(found, {_MOMENT: lambda group: group["momentum"]})
        words, spaces = words_of(found), Workspaces()
        kept = {one.parameter: one for one in found}
        for group in matrices:
            params = group["params"]
            halves = group.get("halves") or [None] * len(params)
            for parameter, half in zip(params, halves, strict=True):
                if parameter.grad is None:
                    continue
                gradient = own_part(parameter.grad)
                if parameter in kept:
                    space = spaces[gradient.device]
                    one, drawn = kept[parameter], words.get(parameter)
                    moment = _compact_moment(one, gradient, drawn, space)
                else:
                    moment = self._moment(parameter, gradient, group)
                self._move(parameter, gradient, moment, group, half)
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def _moment(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Updated local momentum of a parameter."""
        state = self.state[parameter]
        if _MOMENT not in state:
            state[_MOMENT] = torch.zeros_like(parameter)
        moment = own_part(state[_MOMENT])
        return moment.lerp_(gradient, 1 - group["momentum"])

    def _move(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        moment: Tensor,
        group: dict[str, Any],
        halves: Halves | None,
    ) -> None:
        """Update a parameter from its momentum."""
        lr, m = group["lr"], group["momentum"]
        update = on_whole_matrices(
            partial(on_halves, partial(orthogonalized, dtype=self.dtype), halves=halves),
            gradient.lerp(moment, m),
            parameter=parameter,
        )
        weight = own_part(parameter)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update, alpha=-0.2 * lr * max(shape_of_one(parameter, halves)) ** 0.5)


def _compact_moment(one: Compact, gradient: Tensor, words: Words | None, space: Workspace) -> Tensor:
    """Updated momentum before it is rounded for storage."""
    scale, dtype = one.scales.get(_MOMENT), one.parameter.dtype
    moment = read_moment(one.code, one.state, _MOMENT, dtype, space, scale=scale)
    moment.lerp_(gradient.reshape(moment.shape), 1 - one.group["momentum"])
    write_moment(one.code, one.state, _MOMENT, moment, words, space)
    return moment.view(gradient.shape)
