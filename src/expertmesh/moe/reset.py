"""Reset of a layer's parameters and buffers to their state before training."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.moe.init import draw_seed, init_normal_, reset_custom_modules
from expertmesh.moe.module_adapters import reset_adapters


@torch.no_grad()
def reset_layer(layer: Any, seed: int | None, *, std: float | None, out_std: float | None, custom: bool) -> None:
    """Reinitialise every parameter of a MoELayer as its `reset_parameters` says, custom modules' too if `custom`."""
    seed = draw_seed() if seed is None else seed
    prefix = f"layers.{layer.layer_index}.moe."
    for name, parameter in _builtin_parameters(layer):
        if name.endswith((".b_in", ".b_out", ".bias")):
            parameter.zero_()
        elif name == "router.log_scale":
            parameter.fill_(math.log(2.0))  # a temperature of 0.5, as Tutel's
        else:
            given = out_std if name.endswith("w_out") else std
            init_normal_(
                parameter,
                std=parameter.shape[-1] ** -0.5 if given is None else given,
                seed=seed,
                name=prefix + name,
                per_expert=name.startswith("experts."),
            )
    reset_adapters(layer, seed, prefix)
    if layer.options.router_kind == "hash":
        assert isinstance(layer.router.hash_key, Tensor)
        layer.router.hash_key[0].fill_(seed)
        layer.router.hash_key[1].fill_(layer.layer_index)
    if layer.expert_bias_E is not None:
        layer.expert_bias_E.zero_()
    layer.fill_constants()
    if custom and layer.options.router_kind == "module":
        reset_custom_modules(layer.router, seed=seed, name=prefix + "router")
    if custom and layer.grouped is None:
        for index, expert in layer.experts.named_children():
            reset_custom_modules(expert, seed=seed, name=f"{prefix}experts.{index}")


def _builtin_parameters(layer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters of the layer that are not in a custom router or custom expert."""
    for name, parameter in layer.named_parameters():
        custom_router = layer.options.router_kind == "module" and name.startswith("router.")
        custom_expert = layer.grouped is None and name.startswith("experts.")
        if not (custom_router or custom_expert or ".adapters." in name):
            yield name, parameter
