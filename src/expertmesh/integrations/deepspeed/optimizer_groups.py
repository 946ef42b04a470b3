"""Parameter groups by which optimizers tell experts from shared parameters, as `deepspeed.moe.utils` makes them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from expertmesh.config.values import check_type
from expertmesh.errors import ConfigError
from expertmesh.integrations.deepspeed.door import MoE

Group = dict[str, Any]
_GROUPS = 'a group {"params": ..., "name": ...}, or a list of them'


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers with experts, and the number of experts of the first."""
    check_type("m", m, nn.Module, "a torch.nn.Module")
    found = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Group) -> bool:
    """Whether a group of parameters is of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters into shared ones and experts' ones."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of shared parameters and of experts, in the parameters' types; those that are there."""
    both = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    shared, own = ([p.grad.to(p.dtype) for p in part if p.grad is not None] for part in both)
    return shared, own


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | tuple[Group, ...] | list[Group],
    max_group_size: int | float | None = 178956971,  # elements in a group; None: no bound
) -> list[Group]:
    """Move experts' parameters into groups of their own, one per expert-parallel group and number of elements.

    Args:
        param_groups: one group or several, each with "params" and "name"; their "params" are replaced.

    Returns:
        The given groups without experts, then groups with "moe" and the expert-parallel group's name.

    Example:
        >>> moe = MoE(4, nn.Linear(4, 4), num_experts=2)
        >>> groups = split_params_into_different_moe_groups_for_optimizer(
        ...     {"params": list(moe.parameters()), "name": "all"}
        ... )
        >>> [group["name"] for group in groups]
        ['all', 'ep_size_1']
    """
    check_type("param_groups", param_groups, (dict, list, tuple), _GROUPS)
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        check_type("a group", group, dict, _GROUPS)
        if missing := {"params", "name"} - group.keys():
            raise ConfigError(f"a group has no {min(missing)!r}; give every group params and a name")
        group["params"] = list(group["params"])
    names = sorted({p.group_name for g in groups for p in g["params"] if is_moe_param(p)})
    of_experts: list[Group] = []
    for group in groups:
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        for name in names:
            params = [p for p in own if p.group_name == name]  # type: ignore[attr-defined]
            parts = _parts(params, math.inf if max_group_size is None else max_group_size)
            of_experts += [group | {"name": name, "moe": True, "params": part} for part in parts]
    return groups + of_experts


def _parts(params: list[nn.Parameter], most: float) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters with at most so many elements together, or one that is larger."""
    part: list[nn.Parameter] = []
    for parameter in params:
        if part and sum(p.numel() for p in part) + parameter.numel() > most:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Group]:
    """Groups for an optimizer from parameters or groups; groups that have "moe" already stay."""
    if (
        not isinstance(model_parameters, (list, tuple))
        or not model_parameters
        or not all(isinstance(p, (torch.Tensor, dict)) for p in model_parameters)
    ):
        raise ConfigError("model_parameters: must be a list of parameters or of groups; give list(model.parameters())")
    if not isinstance(model_parameters[0], dict):
        whole = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(whole)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
