"""Experts of transformers' models run on ours: `register()` adds `experts_implementation="expertmesh"`, `apply(model)` turns it on."""

from expertmesh.integrations.transformers.register import NAME, apply, register

__all__ = ["NAME", "apply", "register"]
