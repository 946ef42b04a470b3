"""Fused gate and up projections: detection of two matrices stored as one parameter, which Muon must treat
separately."""

from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor, nn

Halves = Literal["rows", "columns", "row pairs", "column pairs"]
"""Layout of the two matrices in (..., A, B): first and last half of the rows or columns, or alternating rows or
columns."""
_AXES: dict[Halves, tuple[int, tuple[int, int], int]] = {
    "rows": (-2, (2, -1), -3),
    "row pairs": (-2, (-1, 2), -2),
    "columns": (-1, (2, -1), -2),
    "column pairs": (-1, (-1, 2), -1),
}
"""Axis to split, sizes of the split, and resulting axis of the pair, by layout."""


def fused_halves(model: nn.Module) -> dict[int, Halves]:
    """Parameters with fused gate and up projections: a sibling parameter takes half of their outputs.

    Stacks of experts are in one module, or in child modules without children; transformers' attribute `is_concatenated`
    says whether the halves are contiguous. In dense MLPs the maps are `nn.Linear`: (2 F, D) with a sibling (D, F), if
    no sibling takes all 2 F. Modules with attributes named after heads are attention, and are skipped. If F = D, an
    activation module is required as well. Experts and MLPs of this package keep the two apart.

    Returns:
        Layout of the halves by the id of the parameter.
    """
    found: dict[int, Halves] = {}
    for module in model.modules():
        near = [module, *(child for child in module.children() if not any(child.children()))]
        stacks = [p for one in near for p in one.parameters(recurse=False) if p.ndim == 3]
        pairs = not getattr(module, "is_concatenated", True)
        for one in stacks:
            num_experts, a, b = one.shape
            beside = [tuple(p.shape) for p in stacks if p is not one]
            if a % 2 == 0 and (num_experts, b, a // 2) in beside:
                found[id(one)] = "row pairs" if pairs else "rows"
            elif b % 2 == 0 and (num_experts, b // 2, a) in beside:
                found[id(one)] = "column pairs" if pairs else "columns"
        if not isinstance(module, nn.ModuleList):
            found |= {id(weight): "rows" for weight in _fused_maps(module)}
    return found


def _fused_maps(module: nn.Module) -> Iterator[Tensor]:
    """Weights of fused gate and up projections among the linear maps directly in a module."""
    maps = [m.weight for m in module.children() if isinstance(m, nn.Linear)]
    said = (*vars(module), *(name for name, _ in module.named_children()))
    if len(maps) < 2 or any("head" in name for name in said):
        return
    is_gated = any(map(_is_activation, module.children()))
    for one in maps:
        a, b = one.shape
        beside = [tuple(p.shape) for p in maps if p is not one]
        takes_half = a % 2 == 0 and (b, a // 2) in beside
        takes_all = any(width == a for _, width in beside)
        if takes_half and not takes_all and (is_gated or a != 2 * b):
            yield one


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation of torch or transformers."""
    where = type(module).__module__
    return where in ("torch.nn.modules.activation", "transformers.activations")


def on_halves(function: Callable[[Tensor], Tensor], x: Tensor, halves: Halves | None) -> Tensor:
    """Apply a function of matrices (..., A, B) to each of the two halves of x; halves=None: to x itself."""
    if halves is None:
        return function(x)
    axis, sizes, place = _AXES[halves]
    parts = x.unflatten(axis, sizes).movedim(place, 0)
    return function(parts).movedim(0, place).flatten(axis - 1, axis)


def shape_of_one(x: Tensor, halves: Halves | None) -> tuple[int, int]:
    """Rows and columns of a single matrix in a parameter."""
    a, b = x.shape[-2:]
    if halves is None:
        return a, b
    return (a // 2, b) if halves.startswith("row") else (a, b // 2)
