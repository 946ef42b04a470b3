"""Construction of a layer's submodules from its options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from expertmesh.config.moe_rules import LayerOptions
from expertmesh.moe.check_arguments import check_modules
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.experts import DenseMLP, ExpertList, GroupedExperts
from expertmesh.moe.router import ROUTERS
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.op_set import select_op_set


def make_router(options: LayerOptions, *, device: Any, dtype: torch.dtype | None) -> nn.Module:
    """Make the router that the options name. Its parameters are FP32, or FP64 in an FP64 layer (`dtype`)."""
    return ROUTERS[options.router](
        dim=options.dim,
        num_experts=options.num_experts,
        cosine_dim=options.cosine_dim,
        router_bias=options.router_bias,
        **_arithmetic(options),
        device=device,
        dtype=accumulate_dtype(dtype or torch.get_default_dtype()),
    )


def _arithmetic(options: LayerOptions) -> dict[str, Any]:
    return {
        "arithmetic": select_op_set(options.batch_invariant),
        "backend": options.backend,
    }


def _of_all_mlps(options: LayerOptions) -> dict[str, Any]:
    return {
        "dim": options.dim,
        "activation": options.activation,
        "bias": options.bias,
        **_arithmetic(options),
    }


def make_experts(
    options: LayerOptions,
    experts: nn.ModuleList | Callable[[int], nn.Module] | None,
    **place: Any,
) -> GroupedExperts | ExpertList:
    """Make grouped experts, or an `ExpertList` of the user's modules; `place` is device and dtype of grouped
    experts."""
    if experts is None:
        return GroupedExperts(
            num_experts=options.num_experts,
            hidden_dim=options.hidden_dim,
            recompute_h=options.recompute_h,
            **_of_all_mlps(options),
            **place,
        )
    modules = [*experts] if isinstance(experts, nn.ModuleList) else [experts(e) for e in range(options.num_experts)]
    check_modules(modules)
    return ExpertList(modules, backend=options.backend)


def make_shared_experts(options: LayerOptions, **place: Any) -> DenseMLP | None:
    """Make the shared experts, one dense MLP; None if there are none. `place` is device and dtype."""
    hidden_dim = options.shared_hidden_dim or options.num_shared_experts * options.hidden_dim
    if not hidden_dim:
        return None
    return DenseMLP(hidden_dim=hidden_dim, **_of_all_mlps(options), **place)


def make_shared_gate(options: LayerOptions, **place: Any) -> Linear | None:
    """Make the gate D -> 1 of the shared experts; None without `shared_gate`. `place` is device and dtype."""
    return Linear(options.dim, 1, **_arithmetic(options), **place) if options.shared_gate else None


def make_residual(options: LayerOptions, **place: Any) -> tuple[DenseMLP | None, Linear | None]:
    """Make PR-MoE's residual MLP and the map D -> 2 to its mixing coefficients, or (None, None). `place` is device and
    dtype."""
    if not options.residual:
        return None, None
    hidden_dim = options.residual_hidden_dim or options.hidden_dim
    mlp = DenseMLP(hidden_dim=hidden_dim, **_of_all_mlps(options), **place)
    return mlp, Linear(options.dim, 2, bias=True, **_arithmetic(options), **place)
