"""Checks of tensors, modules and call arguments. An error is one line: the value, the rule, the fix.

The rules of a layer's options are in `config/moe_rules.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.moe_rules import MOST_FACTOR, check_invariant_factor
from expertmesh.config.values import (
    LEAST_INT64,
    MOST_INT64,
    Number,
    check_choice,
    check_type,
    wrong_type,
)
from expertmesh.errors import ConfigError
from expertmesh.moe.types import Routing
from expertmesh.ops.check import (
    BOOL,
    FLOATS,
    INTEGERS,
    MOVE,
    REAL,
    WHOLE,
    Arg,
    check_device,
    check_range,
    check_tensor,
)
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.op_set import OpSet
from expertmesh.ops.route_metadata import NO_EXPERT
from expertmesh.ops.topk import check_reachable

TOKENS = {
    "token_mask": Arg("*|T", BOOL, "one per token"),
    "token_ids": Arg("*|T", INTEGERS, "one per token"),
    "token_index": Arg("*|T", INTEGERS, "one per token"),
}
"""Arguments of a layer's call beside x."""
_X = Arg("*D", FLOATS, reshape="reshape it, or build the layer with dim of its last size")
_IDS = Arg("TK", INTEGERS, some="K", reshape="replay the same tokens")
_WEIGHTS = Arg("TK", FLOATS, "that of the ids")
_FACTOR = Number(
    0,
    MOST_FACTOR,
    "give 1.0 for the even share, or leave it out for dropless",
    types=REAL,
    is_open=True,
)
_SEED = Number(LEAST_INT64, MOST_INT64, "for example 0", types=WHOLE, optional=True)
_STD = Number(0, fix="leave it out for 1 / sqrt(fan_in)", optional=True)


def check_module(model: Any) -> None:
    """Raise ConfigError unless `model` is an nn.Module (rather than, say, a path)."""
    fix = "load it first, for example with expertmesh.load() or transformers' from_pretrained()"
    check_type("model", model, nn.Module, "a torch.nn.Module", fix)


def check_top_k(top_k: Any, num_experts: int, *, num_groups: int = 1, num_limited_groups: int = 1) -> None:
    """Raise ConfigError unless the top_k of a call is an integer from 1 to the experts that a token may use."""
    fix = "lower top_k or add experts"
    Number(1, num_experts, fix, types=WHOLE, limit="num_experts").check("top_k", top_k)
    check_reachable(top_k, num_experts, num_groups, num_limited_groups)


def check_call_factor(value: Any, *, arithmetic: OpSet) -> None:
    """Raise ConfigError unless the capacity factor of a call is positive (inf: dropless) or None."""
    if value is None:
        return
    if not (isinstance(value, float) and value == math.inf):
        _FACTOR.check("capacity_factor", value)
    if arithmetic.batch_invariant:
        check_invariant_factor("capacity_factor", value)


def check_dtype(dtype: Any) -> None:
    """Raise ConfigError unless a layer's dtype is None or a floating-point type."""
    if dtype is not None:
        check_choice("dtype", dtype, FLOATS.dtypes)


def check_draw(seed: Any, *, std: Any, out_std: Any) -> None:
    """Raise ConfigError unless weights can be drawn with this seed and these standard deviations, each of which may be
    None."""
    _SEED.check("seed", seed)
    _STD.check("std", std)
    _STD.check("out_std", out_std)


def check_parts(router: Any, experts: Any, num_experts: int) -> None:
    """Raise ConfigError unless router and experts are names, modules or functions as `MoELayer` takes them."""
    types = (str, nn.Module)
    check_type("router", router, types, "a name or an nn.Module", "for example router='topk'")
    if isinstance(experts, nn.ModuleList):
        if len(experts) != num_experts:
            raise ConfigError(
                f"experts has {len(experts)} modules and num_experts={num_experts}; give one module per expert"
            )
    elif isinstance(experts, nn.Module) or not (experts is None or callable(experts)):
        what = f"an nn.ModuleList of {num_experts} modules, or a function from the expert's index to a module"
        raise wrong_type("experts", experts, what, "wrap it")


def check_modules(modules: Sequence[Any]) -> None:
    """Raise ConfigError unless the experts of the user are modules, one object each."""
    first: dict[int, int] = {}
    for index, module in enumerate(modules):
        fix = "return one from the function"
        check_type(f"experts[{index}]", module, nn.Module, "an nn.Module", fix)
        other = first.setdefault(id(module), index)
        if other != index:
            raise ConfigError(
                f"experts[{index}] is the same module as experts[{other}]; every expert must have its own; build one "
                "per index, or"
                " copy.deepcopy it"
            )


def check_input(x: Tensor, *, dim: int, weight: Tensor | None, device: torch.device | None = None) -> None:
    """Raise ConfigError unless x fits the layer in its last size, dtype (unless autocast is on) and device."""
    check_tensor("x", x, _X, {"D": dim})
    if weight is None:
        return
    home = weight.device if device is None else device
    if home != x.device:
        fix = "call layer.to_empty(device=...) and layer.reset_parameters()"
        check_device("x", x, home, of="the layer", fix=fix if weight.is_meta else MOVE)
    if weight.dtype == x.dtype:
        return
    if autocast_dtype(x.device) is None:
        raise ConfigError(
            f"x has dtype {x.dtype} and the experts {weight.dtype}; they must be equal outside autocast; "
            "use x.to(...), layer.to(...) or torch.autocast"
        )
    if x.dtype == torch.float64:
        raise ConfigError(
            f"x has dtype {x.dtype} and the experts {weight.dtype}; autocast leaves float64 as it is, and so they must "
            "be equal; use x.to(...) or layer.to(...)"
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
    what = "a Routing, or the RoutingStats of an earlier call"
    check_type("routing", routing, Routing, what, "wrap it in one")
    ids, weights = routing.expert_ids_TK, routing.weights_TK
    check_tensor("routing.expert_ids_TK", ids, _IDS, {"T": num_tokens}, device=device)
    if top_k is not None and top_k != ids.shape[1]:
        raise ConfigError(
            f"top_k={top_k} and the replayed routing has K={ids.shape[1]}; they must be equal; leave top_k out"
        )
    if weights is not None:
        sizes = {"T": num_tokens, "K": ids.shape[1]}
        check_tensor("routing.weights_TK", weights, _WEIGHTS, sizes, device=device)
    fix = "replay into a layer of the same size"
    check_range("routing.expert_ids_TK", ids, most=num_experts, fix=fix, note=NO_EXPERT)
