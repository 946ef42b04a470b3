"""Roles of parameters for the optimizer, declared by a module where type and shape do not tell them."""

from typing import Literal, TypeVar, get_args

from torch import nn

from expertmesh.config.values import check_choice

Role = Literal["table", "edge", "matrix"]
"""Role of a parameter. "table": looked up, added, or a scale. "edge": a matrix at the model's input or output, or a
gate. "matrix": an inner matrix.
"""

_NAME = "learns_as"
M = TypeVar("M", bound=nn.Module)


def learn_as(module: M, role: Role) -> M:
    """Declare the role of a module's parameters for the optimizer. Parameters with one axis stay vectors.

    Args:
        module: the module, marked in place. Submodules inherit the role unless they are marked themselves.
        role: "table": AdamW without weight decay (embeddings, positions). "edge": AdamW with weight decay (heads,
            patches, routers). "matrix": weight decay, and Muon in a run with optim.name=muon.
    """
    check_choice("role", role, get_args(Role))
    setattr(module, _NAME, role)
    return module


def said_role(module: nn.Module) -> Role | None:
    """Role that `learn_as` declared for this module, or None."""
    found: Role | None = getattr(module, _NAME, None)
    return found
