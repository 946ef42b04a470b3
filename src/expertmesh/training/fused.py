"""Two matrices that a stack of experts keeps as one: gate and up, which an optimiser of matrices must see apart."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

Halves = Literal["rows", "columns", "row pairs", "column pairs"]
"""How the two lie in (..., A, B): the first and last half of its rows or columns, or every other one of them."""
_AXES: dict[Halves, tuple[int, tuple[int, int], int]] = {
    "rows": (-2, (2, -1), -3),
    "row pairs": (-2, (-1, 2), -2),
    "columns": (-1, (2, -1), -2),
    "column pairs": (-1, (-1, 2), -1),
}
"""Axis that is cut, in what, and where the two are then."""


def fused_halves(model: nn.Module) -> dict[int, Halves]:
    """Stacks of experts with gate and up in one: those beside another stack that takes half of what they give.

    Our own experts keep them apart. Stacks of transformers say by `is_concatenated` whether the two lie one behind the other.

    Args:
        model: any model.

    Returns:
        How they lie, by the id of the parameter.
    """
    found: dict[int, Halves] = {}
    for module in model.modules():
        stacks = [p for p in module.parameters(recurse=False) if p.ndim == 3]
        pairs = not getattr(module, "is_concatenated", True)
        for one in stacks:
            num_experts, a, b = one.shape
            beside = [tuple(p.shape) for p in stacks if p is not one]
            if a % 2 == 0 and (num_experts, b, a // 2) in beside:
                found[id(one)] = "row pairs" if pairs else "rows"
            elif b % 2 == 0 and (num_experts, b // 2, a) in beside:
                found[id(one)] = "column pairs" if pairs else "columns"
    return found


def on_halves(function: Callable[[Tensor], Tensor], x: Tensor, halves: Halves | None) -> Tensor:
    """A function of matrices (..., A, B), on each of the two in x by itself; None: on x."""
    if halves is None:
        return function(x)
    axis, sizes, place = _AXES[halves]
    parts = x.unflatten(axis, sizes).movedim(place, 0)
    return function(parts).movedim(0, place).flatten(axis - 1, axis)


def shape_of_one(x: Tensor, halves: Halves | None) -> tuple[int, int]:
    """Rows and columns of one matrix in a parameter."""
    a, b = x.shape[-2:]
    if halves is None:
        return a, b
    return (a // 2, b) if halves.startswith("row") else (a, b // 2)
