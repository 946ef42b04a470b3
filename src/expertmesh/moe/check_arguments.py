"""Checks of tensors, modules and call arguments. An error is one line: the value, the rule, the fix.

The rules of a layer's options are in `config/moe_rules.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expertmesh.config.moe_rules import MOST_FACTOR, check_invariant_factor
from expertmesh.errors import ConfigError
from expertmesh.moe.types import Routing
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.op_set import OpSet

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def python_number(value: Any) -> Any:
    """Convert a NumPy number to Python's; return any other value as it is."""
    if value is None or isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return value
    return value.item() if isinstance(value, np.number) else value


def check_module(model: Any) -> None:
    """Raise ConfigError unless `model` is an nn.Module (rather than, say, a path)."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}: must be a torch.nn.Module; load it first, for example with expertmesh.load() or "
            "transformers' from_pretrained()"
        )


def check_top_k(
    top_k: Any, num_experts: int, *, num_groups: int = 1, num_limited_groups: int = 1
) -> None:
    """Raise ConfigError unless the top_k of a call is an integer from 1 to the experts that a token may use."""
    is_int = isinstance(top_k, (int, torch.SymInt)) and not isinstance(top_k, bool)
    if not is_int or not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"top_k={top_k!r} must be an integer from 1 to num_experts={num_experts}; lower top_k or add experts"
        )
    reachable = num_limited_groups * (num_experts // num_groups)
    if num_groups > 1 and top_k > reachable:
        raise ConfigError(
            f"top_k={top_k} must be at most the experts in num_limited_groups={num_limited_groups} groups, {reachable}; lower"
            " top_k or raise num_limited_groups"
        )


def check_call_factor(value: Any, *, arithmetic: OpSet) -> None:
    """Raise ConfigError unless the capacity factor of a call is positive (inf: dropless) or None.

    Args:
        value: the factor.
        arithmetic: the op set of the call.
    """
    if value is None:
        return
    is_number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    is_positive = is_number and not isinstance(value, bool) and value > 0
    if not is_positive or (value > MOST_FACTOR and value != math.inf):
        raise ConfigError(
            f"capacity_factor={value!r} must be a number above 0 and at most {MOST_FACTOR:g}; give 1.0 for the even share, or leave it out for dropless"
        )
    if arithmetic.batch_invariant:
        check_invariant_factor("capacity_factor", value)


def check_dtype(dtype: Any) -> None:
    """Raise ConfigError unless a layer's dtype is None or a floating-point type."""
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(
            f"dtype={dtype!r} must be float64, float32, bfloat16 or float16 of torch; choose one of these"
        )


def check_draw(seed: Any, *, std: Any, out_std: Any) -> None:
    """Raise ConfigError unless weights can be drawn with this seed and these standard deviations, each of which may be None."""
    if seed is not None:
        whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
        if not whole or not -(2**63) <= seed < 2**63:
            raise ConfigError(f"seed={seed!r} must be an integer of 64 bits; for example 0")
    for name, value in (("std", std), ("out_std", out_std)):
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ConfigError(
                f"{name}={value!r} must be a finite number of at least 0; leave it out for 1 / sqrt(fan_in)"
            )


def check_parts(router: Any, experts: Any, num_experts: int) -> None:
    """Raise ConfigError unless router and experts are names, modules or functions as `MoELayer` takes them."""
    if not isinstance(router, (str, nn.Module)):
        raise ConfigError(
            f"router is a {type(router).__name__}; it must be a name or an nn.Module; for example router='topk'"
        )
    if isinstance(experts, nn.ModuleList):
        if len(experts) != num_experts:
            raise ConfigError(
                f"experts has {len(experts)} modules and num_experts={num_experts}; give one module per expert"
            )
    elif isinstance(experts, nn.Module) or not (experts is None or callable(experts)):
        raise ConfigError(
            f"experts is a {type(experts).__name__}; it must be an nn.ModuleList of {num_experts} modules, or a function from "
            "the expert's index to a module; wrap it"
        )


def check_modules(modules: Sequence[Any]) -> None:
    """Raise ConfigError unless the experts of the user are modules, one object each."""
    first: dict[int, int] = {}
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"experts[{index}] is a {type(module).__name__}; it must be an nn.Module; return one from the function"
            )
        other = first.setdefault(id(module), index)
        if other != index:
            raise ConfigError(
                f"experts[{index}] is the same module as experts[{other}]; every expert must have its own; build one per index, or"
                " copy.deepcopy it"
            )


def check_input(
    x: Tensor, *, dim: int, weight: Tensor | None, device: torch.device | None = None
) -> None:
    """Raise ConfigError unless x fits the layer in its last size, dtype (unless autocast is on) and device.

    Args:
        x: input.
        dim: D.
        weight: the weight of the experts, if they are grouped.
        device: where they are computed, if not where the weight is.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"x is a {type(x).__name__}; it must be a tensor of shape (..., {dim}); convert it"
        )
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ConfigError(
            f"x is a {kind} tensor; it must be a dense one of shape (..., {dim}); convert it, for example with padding and token_mask"
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
    if weight is not None and x.dtype == torch.float64 != weight.dtype:
        raise ConfigError(
            f"x has dtype {x.dtype} and the experts {weight.dtype}; autocast leaves float64 as it is, and so they must be equal; "
            "use x.to(...) or layer.to(...)"
        )


def flat_argument(name: str, value: Tensor, x: Tensor, *, boolean: bool) -> Tensor:
    """A per-token argument of shape x.shape[:-1] or (T,), flattened to (T,).

    Raises:
        ConfigError: its shape, dtype or device does not fit.
    """
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; it must be a tensor of shape {tuple(x.shape[:-1])}; convert it with torch.tensor"
        )
    _check_dense(name, value)
    num_tokens = x.numel() // x.shape[-1]
    # not `in`, which torch.compile takes for false where one of two equal sizes is a symbol
    if value.shape != x.shape[:-1] and value.shape != (num_tokens,):
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)}; it must have one entry per token, {tuple(x.shape[:-1])}; reshape it"
        )
    if value.dtype not in ((torch.bool,) if boolean else _INTEGERS):
        raise ConfigError(
            f"{name} has dtype {value.dtype}; it must be {'bool' if boolean else 'an integer type'}; convert it"
        )
    if value.device != x.device:
        raise ConfigError(
            f"{name} is on {value.device} and x on {x.device}; move it with .to(x.device)"
        )
    return value.reshape(num_tokens)


def _check_dense(name: str, value: Tensor) -> None:
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ConfigError(f"{name} is a {kind} tensor; it must be a dense one; convert it")


def check_ids(ids: Tensor, num_experts: int, *, what: str, fix: str) -> None:
    """Raise ConfigError unless expert ids are in [0, E]. Checked only on the CPU in eager mode, where reading them does not synchronise."""
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > num_experts:
        raise ConfigError(
            f"{what} holds {low if low < 0 else high}; ids must be from 0 to num_experts={num_experts} "
            f"(which means no expert); {fix}"
        )


def check_routing(
    routing: Routing,
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int | None,
    device: torch.device,
) -> None:
    """Raise ConfigError unless a replayed choice fits the call."""
    if not isinstance(routing, Routing):
        raise ConfigError(
            f"routing is a {type(routing).__name__}; it must be a Routing, or the RoutingStats of an earlier call; wrap it in one"
        )
    ids, weights = routing.expert_ids_TK, routing.weights_TK
    for name, value in (("expert_ids_TK", ids), ("weights_TK", weights)):
        if not isinstance(value, Tensor) and (name == "expert_ids_TK" or value is not None):
            raise ConfigError(
                f"routing.{name} is a {type(value).__name__}; it must be a tensor; convert it with torch.tensor"
            )
        if value is not None:
            _check_dense(f"routing.{name}", value)
        if value is not None and value.device != device:
            raise ConfigError(
                f"routing.{name} is on {value.device} and x on {device}; move it with .to(x.device)"
            )
    if ids.dim() != 2 or ids.shape[0] != num_tokens or ids.shape[1] < 1:
        raise ConfigError(
            f"routing.expert_ids_TK has shape {tuple(ids.shape)}; it must be ({num_tokens}, K), K at least 1; replay the same tokens"
        )
    if ids.dtype not in _INTEGERS:
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
    if weights is not None and weights.dtype not in _FLOATS:
        raise ConfigError(
            f"routing.weights_TK has dtype {weights.dtype}; it must be floating-point; convert it"
        )
    check_ids(
        ids,
        num_experts,
        what="routing.expert_ids_TK",
        fix="replay into a layer of the same size",
    )
