"""State dicts in another system's layout: maps its tensors to parts of the tensors of a `MoELayer`."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class ForeignName:
    """A tensor of another system's state dict, and the place of its values in ours."""

    theirs: str
    """Name of the tensor in the other system."""
    ours: str
    """Name of our tensor that holds the values."""
    part: tuple[int | slice, ...] | EllipsisType = ...
    """Index into our tensor; ... is all of it."""
    transposed: bool = False
    """Whether the other system has the last two dimensions exchanged."""


def to_foreign(state: dict[str, Any], names: Sequence[ForeignName], *, prefix: str, own_prefix: str) -> None:
    """Rename and split our entries of a state dict into the other system's, in place."""
    ours = prefix + own_prefix
    found = {n.removeprefix(ours): state.pop(n) for n in list(state) if n.startswith(ours)}
    for name in names:
        value: Tensor = found[name.ours][name.part]
        state[prefix + name.theirs] = value.mT if name.transposed else value


def from_foreign(
    state: dict[str, Any],
    names: Sequence[ForeignName],  # one entry for each tensor of the other system
    module: nn.Module,  # the layer; its shapes are read. Parts without an entry in `names` are zero.
    *,
    prefix: str,  # the prefix of the module's names in the state dict
    own_prefix: str,  # the prefix of our tensors' names, after `prefix`
) -> list[str]:
    """Join the other system's entries of a state dict into ours, in place. A state dict under our names is not changed.

    Returns:
        Error lines, one for each tensor that is missing or has another shape.
    """
    if not any(prefix + name.theirs in state for name in names):
        return []
    problems, own = [], module.state_dict()
    for name in names:
        value = state.pop(prefix + name.theirs, None)
        if value is None:
            problems.append(f"{prefix + name.theirs} is missing; all of the layer's tensors must be there")
            continue
        if not isinstance(value, Tensor):
            problems.append(f"{prefix + name.theirs} is a {type(value).__name__}; it must be a tensor")
            continue
        whole = state.get(prefix + own_prefix + name.ours)
        if whole is None:  # in the dtype and on the device of the values, for load_state_dict(assign=True)
            whole = value.new_zeros(own[name.ours].shape)
            state[prefix + own_prefix + name.ours] = whole
        part = whole[name.part]
        part = part.mT if name.transposed else part
        if part.shape != value.shape:
            problems.append(
                f"{prefix + name.theirs} has shape {tuple(value.shape)}; it does not fit {tuple(part.shape)}, a part "
                f"of {name.ours}"
            )
            continue
        part.copy_(value.detach())
    return problems


def keep_where_refused(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Keep the module unchanged if `load_state_dict` will fail: entries that would be copied are replaced by the
    module's own tensors.

    torch copies entries that fit and raises afterwards. Register it as the last hook of
    `register_load_state_dict_pre_hook`.

    Args:
        state: the state dict, under our names; changed in place.
    """
    _, strict, _, _, problems = others
    own = {
        f"{prefix}{name}.{rest}": tensor
        for name, child in module.named_children()
        for rest, tensor in child.state_dict().items()
    }
    given = {name for name in state if name.startswith(prefix)}
    fits = {name for name in given & own.keys() if getattr(state[name], "shape", None) == own[name].shape}
    if problems or fits != given & own.keys() or (strict and given != own.keys()):
        for name in fits:
            state[name] = own[name]
