"""How the parameters of a module are to be learned, said by the module where its type and its shapes do not say it."""

from typing import Literal, TypeVar, get_args

from torch import nn

from expertmesh.errors import ConfigError

Role = Literal["table", "edge", "matrix"]
"""table: looked up, added or scaled with; edge: a matrix between the model and what is outside, or a gate; matrix: one inside."""

_NAME = "learns_as"
M = TypeVar("M", bound=nn.Module)


def learn_as(module: M, role: Role) -> M:
    """Say what all parameters of a module are for the optimiser; those of one axis are vectors all the same.

    Args:
        module: marked in place; its submodules follow, unless they are marked themselves.
        role: "table": not decayed, AdamW's (embeddings, positions). "edge": decayed, AdamW's (heads, patches, routers). "matrix":
            decayed, Muon's in a run with optim.name=muon.

    Returns:
        The module.

    Raises:
        ConfigError: there is no such role.
    """
    if role not in get_args(Role):
        raise ConfigError(f"role={role!r}: must be one of {', '.join(get_args(Role))}; use one")
    setattr(module, _NAME, role)
    return module


def said_role(module: nn.Module) -> Role | None:
    """What `learn_as` said of this module, or None."""
    found: Role | None = getattr(module, _NAME, None)
    return found
