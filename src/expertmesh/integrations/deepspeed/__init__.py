"""Replacement for DeepSpeed's `MoE` and the functions of `deepspeed.moe.utils`; other names of `deepspeed.moe` are refused.

Change `from deepspeed.moe.layer import MoE` and `from deepspeed.moe.utils import ...` to imports from here.
"""

from typing import NoReturn

from expertmesh.errors import ConfigError
from expertmesh.integrations.deepspeed.door import MoE
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
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

_GATING = "route with expertmesh.MoELayer, or choose with expertmesh.functional.choose_experts"
_TENSOR = "use tensor parallelism of expertmesh.parallelize"
REFUSED = {
    "top1gating": _GATING,
    "top2gating": _GATING,
    "topkgating": _GATING,
    "TopKGate": "give the options to MoE, or a router of your own to expertmesh.MoELayer",
    "MOELayer": "use MoE, or expertmesh.MoELayer",
    "Experts": "give `expert` to MoE, or `experts` to expertmesh.MoELayer",
    "multiplicative_jitter": "use MoE(noisy_gate_policy='Jitter')",
    "gumbel_rsample": "use MoE(noisy_gate_policy='RSample')",
    "einsum": "use torch.einsum",
    "gather_tokens": _TENSOR,
    "drop_tokens": _TENSOR,
}
"""Names of `deepspeed.moe.sharded_moe`, `experts` and `mappings` without a counterpart, with the way out."""


def __getattr__(name: str) -> NoReturn:
    if name in REFUSED:
        raise ConfigError(f"deepspeed.moe's {name} has no counterpart here; {REFUSED[name]}")
    raise AttributeError(f"the door of deepspeed.moe has no attribute {name!r}")
