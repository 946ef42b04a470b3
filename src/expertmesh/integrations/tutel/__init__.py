"""Replacement for Tutel: `moe`, `net`, `system` and `checkpoint` under their names, with the MoE layer on our
operators.

Change `from tutel import system, moe, net` to `from expertmesh.integrations.tutel import system, moe, net`; Tutel
itself is not needed. What has no counterpart is refused by name, see `refused`.
"""

from expertmesh.integrations.tutel import checkpoint, jit, launcher, moe, net, refused, system
from expertmesh.integrations.tutel.moe_layer import MOELayer, moe_layer

__all__ = ["MOELayer", "checkpoint", "jit", "launcher", "moe", "moe_layer", "net", "system"]

__getattr__ = refused.refusing("tutel")
