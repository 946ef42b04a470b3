"""Memory for a sharded model that was built on the meta device: each rank allocates its own shards only."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def give_memory(model: nn.Module, *, device: torch.device | str, offload: bool = False) -> None:
    """Allocate the shards of a model without initializing values; initialize them next.

    Args:
        model: sharded by `expertmesh.parallel.apply.parallelize` on the meta device.
        device: the device that computes.
        offload: keep parameters in host memory; buffers are on the device in any case.
    """
    model.to_empty(device="cpu" if offload else device)
    if not offload:
        return
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):  # not sharded, so not offloaded
                parameter.data = torch.empty_like(parameter, device=device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
