"""Two matrices that a stack of experts or a dense MLP keeps as one: gate and up, which an optimiser of matrices must see apart."""

from collections.abc import Callable, Iterator
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
    """Parameters with gate and up in one: those beside another one that takes half of what they give.

    Stacks of experts lie in one module, or in modules of it that have no others; transformers' say by `is_concatenated` whether the
    two lie one behind the other. Of dense MLPs the maps are `nn.Linear`, (2 F, D) beside (D, F) where none takes all 2 F; a module
    that speaks of heads is attention. Where F = D an activation has to lie beside them. Our own experts and MLPs keep the two apart.

    Args:
        model: any model.

    Returns:
        How they lie, by the id of the parameter.
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
    """Weights of the linear maps directly in a module that hold gate and up."""
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
    """Whether it is one of torch's or transformers' activations."""
    where = type(module).__module__
    return where in ("torch.nn.modules.activation", "transformers.activations")


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
