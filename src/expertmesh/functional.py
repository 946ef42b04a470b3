"""Operators and losses of the MoE layer, for use in other mixture-of-experts systems.

Example:
    >>> import torch
    >>> ids_TK = torch.tensor([[0, 2], [2, 1], [0, 2]])
    >>> em.functional.count_choices(ids_TK, 3, None).tolist()
    [[2, 1, 3]]
"""

from expertmesh.moe.capacity import count_choices
from expertmesh.moe.checkpointing import routing_checkpoint_contexts, routing_checkpoint_policy
from expertmesh.moe.losses import importance_load_loss, router_z_loss, switch_loss
from expertmesh.moe.warm_up import warm_up
from expertmesh.ops.experts.grouped_linear import grouped_linear
from expertmesh.ops.experts.moe_mlp import moe_mlp
from expertmesh.ops.experts.weights import WeightGradients
from expertmesh.ops.permute import combine, permute, unpermute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata
from expertmesh.ops.topk import choose_experts

__all__ = [
    "RouteMetadata",
    "WeightGradients",
    "choose_experts",
    "combine",
    "count_choices",
    "grouped_linear",
    "importance_load_loss",
    "moe_mlp",
    "permute",
    "route_metadata",
    "router_z_loss",
    "routing_checkpoint_contexts",
    "routing_checkpoint_policy",
    "switch_loss",
    "unpermute",
    "warm_up",
]
