"""Stands for `tutel.jit`, whose names are refused."""

from expertmesh.integrations.tutel import refused

__getattr__ = refused.refusing("tutel.jit")
