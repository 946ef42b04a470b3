"""Replacement for DeepSpeed's `MoE`, its gating functions and `deepspeed.moe.utils`; other names are refused.

Change `from deepspeed.moe.layer import MoE` and `from deepspeed.moe.utils import ...` to imports from here.
"""

from expertmesh.config.no_counterpart import refusing
from expertmesh.integrations.deepspeed.door import MoE
from expertmesh.integrations.deepspeed.expert_files import load_expert_files, save_expert_files
from expertmesh.integrations.deepspeed.gating import (
    TopKGate,
    einsum,
    gumbel_rsample,
    multiplicative_jitter,
    top1gating,
    top2gating,
    topkgating,
)
from expertmesh.integrations.deepspeed.optimizer_groups import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)

__all__ = [
    "MoE",
    "TopKGate",
    "configure_moe_param_groups",
    "einsum",
    "gumbel_rsample",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "load_expert_files",
    "multiplicative_jitter",
    "save_expert_files",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
    "top1gating",
    "top2gating",
    "topkgating",
]

REFUSED = {
    f"deepspeed.moe.{name}": way_out
    for way_out, names in {
        "use MoE, or expertmesh.MoELayer": "MOELayer",
        "give `expert` to MoE, or `experts` to expertmesh.MoELayer": "Experts",
        "use tensor parallelism of expertmesh.parallelize": "gather_tokens drop_tokens",
        "import its names from here": "layer utils sharded_moe experts mappings",
        "spread a model of transformers with DistributedConfig(ep_implementation='expertmesh')": "ep_count ep_experts "
        "ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout",
    }.items()
    for name in names.split()
}
"""Names of `deepspeed.moe` and its modules without a counterpart, with the way out. A module stands for all that is in
it."""

__getattr__ = refusing("deepspeed.moe", REFUSED)
