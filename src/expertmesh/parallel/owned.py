"""Parameters that only some ranks have."""

import torch
from torch import Tensor, nn

from expertmesh.comm.group import RankGroup


class OwnedParameter(nn.Parameter):
    """A whole parameter of which the other ranks of a group have none; each has some of its own.

    So the norm of a model's gradient is a sum over the group, while for a plain parameter every rank has all of it.

    Attributes:
        owners: the group.
    """

    owners: RankGroup

    def __new__(cls, parameter: nn.Parameter, owners: RankGroup) -> "OwnedParameter":
        """The same memory as another parameter."""
        own: OwnedParameter = torch.Tensor._make_subclass(
            cls, parameter.detach(), parameter.requires_grad
        )
        own.owners = owners
        return own

    def __deepcopy__(self, memo: dict[int, object]) -> "OwnedParameter":
        """A copy of the values, of the same owners."""
        if id(self) not in memo:
            values: Tensor = self.detach().clone(memory_format=torch.preserve_format)
            copy = OwnedParameter(nn.Parameter(values, self.requires_grad), self.owners)
            memo[id(self)] = copy
        found = memo[id(self)]
        assert isinstance(found, OwnedParameter)
        return found
