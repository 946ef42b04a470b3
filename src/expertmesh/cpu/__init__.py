"""Faster ways on processors, all optional: without this folder everything is computed, more slowly."""

from expertmesh.cpu.compiled import compiled_forward
from expertmesh.engine.faster_forward import FASTER

FASTER.append(compiled_forward)
