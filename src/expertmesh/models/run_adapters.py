"""Adapters of a run's configuration on its model."""

from typing import Any

import torch
from torch import nn

from expertmesh import lora
from expertmesh.config.run import RunConfig
from expertmesh.moe.layer import MoELayer


def adapt(model: nn.Module, config: RunConfig, *, dtype: torch.dtype) -> None:
    """Put a run's adapters on its model, whose weights then rest."""
    options, moe = config.adapter, getattr(config.model, "moe", None)
    if not options.rests:
        return
    made: dict[str, Any] = {
        "rank": options.rank,
        "alpha": options.alpha,
        "rslora": options.rslora,
        "expert_rank": options.expert_rank_of(getattr(moe, "top_k", 1)),
        "targets": options.targets,
        "dropout": options.dropout,
        "shared": options.shared,
    }
    wide = torch.promote_types(dtype, torch.float32)
    lora.add(model, **made, dtype=wide, seed=config.train.seed)
    if options.learn_routers:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.router.requires_grad_(True)
