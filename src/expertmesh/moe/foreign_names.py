"""State dicts under another system's names: which tensor of theirs is which part of which tensor of a `MoELayer`."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ForeignName:
    """One tensor of another system's state dict.

    Attributes:
        theirs: its name there.
        ours: name of the tensor of ours that holds it.
        part: index of that tensor which gives it; ... is all of it.
        transposed: whether its last two dimensions are exchanged there.
    """

    theirs: str
    ours: str
    part: tuple[int | slice, ...] | EllipsisType = ...
    transposed: bool = False


def to_foreign(
    state: dict[str, Any], names: Sequence[ForeignName], *, prefix: str, own_prefix: str
) -> None:
    """Replace our entries of a state dict by theirs, in place.

    Args:
        state: a state dict that holds our names.
        names: the names of all tensors of ours.
        prefix: the prefix of the module's names in the state dict.
        own_prefix: the prefix of our tensors, after `prefix`.
    """
    ours = prefix + own_prefix
    found = {n.removeprefix(ours): state.pop(n) for n in list(state) if n.startswith(ours)}
    for name in names:
        value: Tensor = found[name.ours][name.part]
        state[prefix + name.theirs] = value.mT if name.transposed else value


def from_foreign(
    state: dict[str, Any],
    names: Sequence[ForeignName],
    module: nn.Module,
    *,
    prefix: str,
    own_prefix: str,
) -> list[str]:
    """Replace their entries of a state dict by ours, in place; a state dict under our names stays as it is.

    Args:
        state: a state dict.
        names: the names of all tensors of ours.
        module: the layer, for shapes and dtypes; parts that they do not have are zero.
        prefix: the prefix of the module's names in the state dict.
        own_prefix: the prefix of our tensors, after `prefix`.

    Returns:
        One line for each tensor that is missing or has another shape.
    """
    if not any(prefix + name.theirs in state for name in names):
        return []
    problems, own = [], module.state_dict()
    for name in names:
        value = state.pop(prefix + name.theirs, None)
        if value is None:
            problems.append(
                f"{prefix + name.theirs} is missing; all of the layer's tensors must be there"
            )
            continue
        whole = state.setdefault(prefix + own_prefix + name.ours, torch.zeros_like(own[name.ours]))
        part = whole[name.part]
        part = part.mT if name.transposed else part
        if part.shape != value.shape:
            problems.append(
                f"{prefix + name.theirs} has shape {tuple(value.shape)}; it does not fit {tuple(part.shape)}, a part of {name.ours}"
            )
            continue
        part.copy_(value)
    return problems


def keep_where_refused(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before a state dict is loaded: where it will be refused, what fits of it becomes what the module has, so that nothing changes.

    torch copies what fits and raises afterwards. Register it as the last hook of `register_load_state_dict_pre_hook`.

    Args:
        module: whose modules inside have all of its tensors.
        state: under our names; changed in place.
        prefix: of the module's names in it.
        others: what torch gives such hooks: metadata, whether names must match, missing and unexpected names, messages.
    """
    _, strict, _, _, problems = others
    own = {
        f"{prefix}{name}.{rest}": tensor
        for name, child in module.named_children()
        for rest, tensor in child.state_dict().items()
    }
    given = {name for name in state if name.startswith(prefix)}
    fits = {
        name
        for name in given & own.keys()
        if getattr(state[name], "shape", None) == own[name].shape
    }
    if problems or fits != given & own.keys() or (strict and given != own.keys()):
        for name in fits:
            state[name] = own[name]
