"""Upcycling of a dense GPT to a GPT with experts, which is trained, spread, saved and exported like any other."""

from typing import Any

from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.models.expert_copies import ExpertCopies
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.experts import DenseMLP
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.module_adapters import refuse_adapters


def upcycle_gpt(model: GPT, copies: ExpertCopies, *, every: int, options: dict[str, Any]) -> list[str]:
    """Replace the feed-forward blocks of every n-th layer, and change the model's configuration, in place.

    Args:
        model: a dense GPT, not spread over ranks and not on the meta device.
        copies: options for turning a block into experts.
        every: new value of `moe_every`.
    """
    before = model.config
    if before.num_moe_layers:
        raise ConfigError(f"GPT: has {before.num_moe_layers} layers with experts already; upcycle a dense one")
    refuse_adapters(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or getattr(parameter, "device_mesh", None) is not None:
            what = "has no memory yet" if parameter.is_meta else "is spread over ranks already"
            raise ConfigError(f"GPT: {name} {what}; upcycle a model that is whole, and spread it afterwards")
    g = copies.granularity
    config = before.updated(
        {
            "moe_every": every,
            "moe": {
                "num_experts": (copies.num_copies * g,),
                "top_k": copies.top_k * g,
                "hidden_dim": copies.hidden_dim(before.ffn_hidden_dim),
                "normalize_weights": "topk",
                "weight_scale": float(g),
                **options,
            },
        }
    )
    made: list[tuple[nn.Module, int, MoELayer]] = []
    for index, num_experts in enumerate(config.experts_per_layer()):
        block: Any = model.layers[index]
        if not num_experts:
            continue
        dense: DenseMLP = block.ffn
        layer = MoELayer.from_config(
            config.moe_layer,
            dim=config.dim,
            num_experts=num_experts,
            activation=config.activation,
            residual_hidden_dim=config.ffn_hidden_dim,
            layer_index=index,
            device=dense.w_in.device,
            dtype=dense.w_in.dtype,
        )
        layer.reset_parameters(copies.seed, std=config.init_std)
        copies.fill(layer, dense.w_in.detach(), dense.w_out.detach(), layer_index=index)
        made.append((block, index, layer.train(block.training)))
    for block, _, layer in made:
        block.moe, block.ffn = layer, None
    model.config = config
    return [f"layers.{index}.ffn" for _, index, _ in made]
