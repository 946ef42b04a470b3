"""Integration with transformers: its models' experts run on our operators (`register`, `apply`), and our GPT is one of
its models (`ExpertMeshForCausalLM`).
"""

from expertmesh.integrations.transformers.model import (
    ExpertMeshConfig,
    ExpertMeshForCausalLM,
    ExpertMeshOutput,
)
from expertmesh.integrations.transformers.register import NAME, apply, register
from expertmesh.integrations.transformers.trainer import BalanceExperts
from expertmesh.integrations.transformers.upcycled import as_moe_model

__all__ = [
    "NAME",
    "BalanceExperts",
    "ExpertMeshConfig",
    "ExpertMeshForCausalLM",
    "ExpertMeshOutput",
    "apply",
    "as_moe_model",
    "register",
]
