"""Faster ways on processors, all optional: without this folder everything is computed, more slowly."""

from expertmesh.cpu import recorded_steps
from expertmesh.engine.faster_forward import FASTER

FASTER.append(recorded_steps.recorded_steps)
