"""Every mistake in the options or arguments of a MoELayer, as one line: the value, the rule, the fix."""

import difflib
import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from expertmesh.config.model import (
    Activation,
    Backend,
    BalanceLoss,
    DropPolicy,
    LossScope,
    NormalizeWeights,
    RouterKind,
    RouterNoise,
    ScoreFunction,
)
from expertmesh.errors import ConfigError
from expertmesh.moe.types import Routing
from expertmesh.ops.dtypes import autocast_dtype

CHOICES: dict[str, tuple[str, ...]] = {
    "router": get_args(RouterKind),
    "score_function": get_args(ScoreFunction),
    "normalize_weights": get_args(NormalizeWeights),
    "router_noise": get_args(RouterNoise),
    "drop_policy": get_args(DropPolicy),
    "activation": get_args(Activation),
    "balance_loss": get_args(BalanceLoss),
    "balance_loss_scope": get_args(LossScope),
    "backend": get_args(Backend),
}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_POSITIVE_COUNTS = (
    "dim",
    "hidden_dim",
    "num_experts",
    "num_expert_groups",
    "num_limited_groups",
    "cosine_dim",
)
_OPTIONAL_COUNTS = ("routing_group_size", "shared_hidden_dim", "residual_hidden_dim")
_COUNTS_FROM_ZERO = ("min_capacity", "num_shared_experts", "layer_index")
_FACTORS = ("capacity_factor", "eval_capacity_factor", "max_capacity_factor")
_FRACTIONS = ("input_jitter", "input_dropout")
_NOT_NEGATIVE = ("router_noise_std", "bias_update_rate", "aux_loss_weight", "z_loss_weight")


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(
        value, bool
    )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ConfigError unless the value is one of the choices; suggests the nearest."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(choices)}"
    raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}; {hint}")


def check_top_k(top_k: Any, num_experts: int) -> None:
    """Raise ConfigError unless top_k is an integer from 1 to num_experts."""
    if not _is_int(top_k) or not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"top_k={top_k!r} must be an integer from 1 to num_experts={num_experts}; lower top_k or add experts"
        )


def check_factor(name: str, value: Any) -> None:
    """Raise ConfigError unless a capacity factor is positive (inf: dropless) or None."""
    if value is None:
        return
    if not _is_number(value) or not value > 0:
        raise ConfigError(
            f"{name}={value!r} must be a number above 0; give 1.0 for the even share, or leave it out for dropless"
        )


def check_options(options: dict[str, Any]) -> None:
    """Check the keyword arguments of MoELayer, one by one and together.

    Raises:
        ConfigError: the first mistake found.
    """
    for name, choices in CHOICES.items():
        if not (name == "router" and isinstance(options[name], nn.Module)):
            check_choice(name, options[name], choices)
    for name in _POSITIVE_COUNTS + _OPTIONAL_COUNTS:
        value = options[name]
        if value is None and name in _OPTIONAL_COUNTS:
            continue
        if not _is_int(value) or value < 1:
            raise ConfigError(
                f"{name}={value!r} must be an integer of at least 1; give a positive count"
            )
    for name in _COUNTS_FROM_ZERO:
        value = options[name]
        if not _is_int(value) or value < 0:
            raise ConfigError(
                f"{name}={value!r} must be an integer of at least 0; give 0 to switch it off"
            )
    check_top_k(options["top_k"], options["num_experts"])
    for name in _FACTORS:
        check_factor(name, options[name])
    for name in _FRACTIONS:
        value = options[name]
        if not _is_number(value) or not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r} must be in [0, 1); give 0 to switch it off")
    for name in _NOT_NEGATIVE:
        value = options[name]
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ConfigError(
                f"{name}={value!r} must be a finite number of at least 0; give 0 to switch it off"
            )
    for name in ("logit_temperature", "weight_scale"):
        value = options[name]
        if not _is_number(value) or not 0 < value < math.inf:
            raise ConfigError(
                f"{name}={value!r} must be a finite number above 0; give 1.0 for no effect"
            )
    dtype = options["dtype"]
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(
            f"dtype={dtype} must be float64, float32, bfloat16 or float16; choose one of these"
        )
    _check_groups(options)
    _check_router(options)
    _check_experts(options)
    if not isinstance(options["batch_invariant"], bool):
        raise ConfigError(
            f"batch_invariant={options['batch_invariant']!r} must be True or False; give one of these"
        )
    if options["batch_invariant"]:
        _check_invariant_parts(options)
        check_batch_invariant(
            {name: options[name] for name in ("eval_capacity_factor", "max_capacity_factor")}
        )


def _check_invariant_parts(options: dict[str, Any]) -> None:
    router, experts = options["router"], options["experts"]
    problem = None
    if isinstance(router, nn.Module):
        problem = f"router={type(router).__name__}: the layer does not order the sums of a router of your own"
    elif router == "expert_choice":
        problem = "router='expert_choice': experts choose among the tokens of the batch"
    elif experts is not None:
        problem = f"experts={type(experts).__name__}: the layer does not order the sums of experts of your own"
    elif options["backend"] == "reference":
        problem = "backend='reference': the order of its sums follows the batch"
    if problem is not None:
        raise ConfigError(
            f"batch_invariant=True with {problem}; leave batch_invariant at False, or change it"
        )


def check_batch_invariant(factors: dict[str, float | None]) -> None:
    """Raise ConfigError if one of these factors limits an expert's rows in evaluation: the batch decides who stays."""
    for name, value in factors.items():
        if value is not None and not math.isinf(value):
            raise ConfigError(
                f"batch_invariant=True with {name}={value}: which rows exceed a capacity in evaluation depends on the "
                f"batch; leave {name} out, or batch_invariant at False"
            )


def _check_groups(options: dict[str, Any]) -> None:
    groups, limited = options["num_expert_groups"], options["num_limited_groups"]
    E, K = options["num_experts"], options["top_k"]
    if E % groups:
        raise ConfigError(
            f"num_expert_groups={groups} must divide num_experts={E}; choose a divisor of {E}"
        )
    if limited > groups:
        raise ConfigError(
            f"num_limited_groups={limited} must be at most num_expert_groups={groups}; lower it"
        )
    if limited * (E // groups) < K:
        raise ConfigError(
            f"top_k={K} exceeds the {limited * (E // groups)} experts in num_limited_groups={limited} groups of "
            f"{E // groups}; allow more groups or lower top_k"
        )


def _check_router(options: dict[str, Any]) -> None:
    router = options["router"]
    if router == "expert_choice" and options["score_function"] == "softmax_after_topk":
        raise ConfigError(
            "score_function='softmax_after_topk' needs tokens that choose, and router='expert_choice' lets experts "
            "choose; use 'softmax' or 'sigmoid'"
        )
    neutral: dict[str, int | str] = {"num_expert_groups": 1, "bias_update_rate": 0}
    if router == "hash":
        neutral |= {
            "router_noise": "none",
            "input_jitter": 0,
            "input_dropout": 0,
            "logit_temperature": 1,
        }
    if router in ("hash", "expert_choice"):
        for name, value in neutral.items():
            if options[name] != value:
                raise ConfigError(
                    f"{name}={options[name]!r} has no effect with router={router!r}; leave it at {value!r}"
                )


def _check_experts(options: dict[str, Any]) -> None:
    experts, E = options["experts"], options["num_experts"]
    if experts is None:
        return
    if isinstance(experts, nn.ModuleList):
        if len(experts) != E:
            raise ConfigError(
                f"experts has {len(experts)} modules and num_experts={E}; give one module per expert"
            )
        return
    if isinstance(experts, nn.Module) or not callable(experts):
        raise ConfigError(
            f"experts is a {type(experts).__name__}; it must be an nn.ModuleList of {E} modules, or a function from "
            "the expert's index to a module; wrap it"
        )


def check_input(
    x: Tensor, *, dim: int, weight: Tensor | None, device: torch.device | None = None
) -> None:
    """Raise ConfigError unless x fits the layer in its last size, dtype (unless autocast is on) and device.

    Args:
        x: input.
        dim: D.
        weight: of the experts, if they are grouped.
        device: where they are computed, if not where the weight is.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"x is a {type(x).__name__}; it must be a tensor of shape (..., {dim}); convert it"
        )
    if x.dim() < 1 or x.shape[-1] != dim:
        raise ConfigError(
            f"x has shape {tuple(x.shape)}; its last size must be dim={dim}; build the layer with dim="
            f"{x.shape[-1] if x.dim() else 1} or reshape x"
        )
    if x.dtype not in _FLOATS:
        raise ConfigError(f"x has dtype {x.dtype}; it must be floating-point; convert it")
    home = device if device is not None or weight is None else weight.device
    if weight is not None and home != x.device:
        fix = (
            "call layer.to_empty(device=...) and layer.reset_parameters()"
            if weight.is_meta
            else "move one of them with .to(device)"
        )
        raise ConfigError(f"x is on {x.device} and the layer on {home}; {fix}")
    if weight is not None and autocast_dtype(x.device) is None and weight.dtype != x.dtype:
        raise ConfigError(
            f"x has dtype {x.dtype} and the experts {weight.dtype}; they must be equal outside autocast; "
            "use x.to(...), layer.to(...) or torch.autocast"
        )


def flat_argument(name: str, value: Tensor, x: Tensor, *, boolean: bool) -> Tensor:
    """A per-token argument of shape x.shape[:-1] or (T,), flattened to (T,).

    Raises:
        ConfigError: its shape, dtype or device does not fit.
    """
    num_tokens = x.numel() // x.shape[-1]
    if tuple(value.shape) not in (tuple(x.shape[:-1]), (num_tokens,)):
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)}; it must have one entry per token, {tuple(x.shape[:-1])}; reshape it"
        )
    is_boolean = value.dtype == torch.bool
    is_integer = not (is_boolean or value.is_floating_point() or value.is_complex())
    if not (is_boolean if boolean else is_integer):
        raise ConfigError(
            f"{name} has dtype {value.dtype}; it must be {'bool' if boolean else 'an integer type'}; convert it"
        )
    if value.device != x.device:
        raise ConfigError(
            f"{name} is on {value.device} and x on {x.device}; move it with .to(x.device)"
        )
    return value.reshape(num_tokens)


def check_routing(
    routing: Routing, *, num_tokens: int, num_experts: int, top_k: int | None
) -> None:
    """Raise ConfigError unless a replayed choice fits the call; ids are range-checked on the CPU in eager mode."""
    ids, weights = routing.expert_ids_TK, routing.weights_TK
    if ids.dim() != 2 or ids.shape[0] != num_tokens:
        raise ConfigError(
            f"routing.expert_ids_TK has shape {tuple(ids.shape)}; it must be ({num_tokens}, K); replay the same tokens"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(
            f"routing.expert_ids_TK has dtype {ids.dtype}; it must be an integer type; convert it"
        )
    if top_k is not None and top_k != ids.shape[1]:
        raise ConfigError(
            f"top_k={top_k} and the replayed routing has K={ids.shape[1]}; they must be equal; leave top_k out"
        )
    if weights is not None and weights.shape != ids.shape:
        raise ConfigError(
            f"routing.weights_TK has shape {tuple(weights.shape)}; it must be that of the ids, {tuple(ids.shape)}; fix one"
        )
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > num_experts:
        raise ConfigError(
            f"routing.expert_ids_TK holds {low if low < 0 else high}; ids must be from 0 to num_experts={num_experts} "
            "(which means no expert); replay into a layer of the same size"
        )
