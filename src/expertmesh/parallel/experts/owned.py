"""Parameters that one rank of a group has, and what must leave them alone."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from expertmesh.comm.group import RankGroup
from expertmesh.errors import ConfigError


class OwnedParameter(nn.Parameter):
    """Whole parameter that no other rank of a group has; each rank has its own ones.

    The norm of a model's gradient is therefore a sum over the group, while plain parameters are equal on every rank.
    """

    owners: RankGroup

    @classmethod
    def adopt(cls, parameter: nn.Parameter, owners: RankGroup) -> None:
        """Turn a parameter into an owned one in place, so that an optimizer that has it keeps it."""
        parameter.__class__ = cls
        assert isinstance(parameter, OwnedParameter)
        parameter.owners = owners

    def __deepcopy__(self, memo: dict[int, object]) -> "OwnedParameter":
        """Copy of the values, with the same owners."""
        if id(self) not in memo:
            values: Tensor = self.detach().clone(memory_format=torch.preserve_format)
            copy = nn.Parameter(values, self.requires_grad)
            OwnedParameter.adopt(copy, self.owners)
            memo[id(self)] = copy
        found = memo[id(self)]
        assert isinstance(found, OwnedParameter)
        return found


def refuse_engine(layer: str, *_: object) -> None:
    """`set_deepspeed_parallelism` of a layer that is spread, which DeepSpeed's engine calls before anything else."""
    raise ConfigError(
        f"{layer}: its experts are spread already, and DeepSpeed's engine would average the gradients of different "
        "experts; give deepspeed.initialize a model of expertmesh.integrations.deepspeed.MoE that was not spread"
    )


def check_left_alone(experts: nn.Module, *, layer: str) -> None:
    """Raise ConfigError where a wrapper would average, or cut, what differs between the ranks that own it."""
    own = list(experts.parameters())
    if not all(isinstance(parameter, OwnedParameter) for parameter in own):
        raise ConfigError(
            f"{layer}: parameters of its experts, which differ between ranks, were added or replaced after they were "
            "spread; give the experts' parameters to fully_shard as ignored_params, and change modules before"
        )
    wrapper = DistributedDataParallel._active_ddp_module
    split = {p for p in own if isinstance(p, OwnedParameter) and p.owners.size > 1}
    if wrapper is None or not split:
        return
    for name, parameter in wrapper.module.named_parameters():
        if parameter in split and name not in wrapper.parameters_to_ignore:
            raise ConfigError(
                f"{layer}: DistributedDataParallel averages {name}, which differs between ranks; name the experts' "
                "parameters"
                " in model._ddp_params_and_buffers_to_ignore before it wraps the model"
            )
