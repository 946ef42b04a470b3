"""Replacement for DeepSpeed's `MoE`, its gating functions and `deepspeed.moe.utils`; other names are refused.

Change `from deepspeed.moe.layer import MoE` and `from deepspeed.moe.utils import ...` to imports from here.
"""

from typing import NoReturn

from expertmesh.errors import ConfigError
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

_TENSOR = "use tensor parallelism of expertmesh.parallelize"
REFUSED = {
    "MOELayer": "use MoE, or expertmesh.MoELayer",
    "Experts": "give `expert` to MoE, or `experts` to expertmesh.MoELayer",
    "gather_tokens": _TENSOR,
    "drop_tokens": _TENSOR,
}
"""Names of `deepspeed.moe.sharded_moe`, `experts` and `mappings` without a counterpart, with the way out."""


def __getattr__(name: str) -> NoReturn:
    if name in REFUSED:
        raise ConfigError(f"deepspeed.moe's {name} has no counterpart here; {REFUSED[name]}")
    raise AttributeError(f"the door of deepspeed.moe has no attribute {name!r}")
