"""Stands for `tutel.launcher`: ranks are started by torchrun."""

from expertmesh.integrations.tutel import refused

__getattr__ = refused.refusing("tutel.launcher")
