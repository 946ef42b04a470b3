"""ExpertMesh: a mixture-of-experts system for PyTorch.

Importing this package is cheap; torch is imported when a name that needs it is first used (PEP 562), so that
`expertmesh --help` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertmesh import functional as functional
    from expertmesh.errors import CheckpointError as CheckpointError
    from expertmesh.errors import ConfigError as ConfigError
    from expertmesh.errors import TrainingDivergedError as TrainingDivergedError
    from expertmesh.moe.layer import MoELayer as MoELayer
    from expertmesh.moe.types import Routing as Routing
    from expertmesh.moe.types import RoutingStats as RoutingStats

__version__ = "0.1.0"

_HOME = {
    "MoELayer": "expertmesh.moe.layer",
    "Routing": "expertmesh.moe.types",
    "RoutingStats": "expertmesh.moe.types",
    "ConfigError": "expertmesh.errors",
    "CheckpointError": "expertmesh.errors",
    "TrainingDivergedError": "expertmesh.errors",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "MoELayer",
    "Routing",
    "RoutingStats",
    "TrainingDivergedError",
    "functional",
]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return import_module("expertmesh.functional")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'expertmesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
