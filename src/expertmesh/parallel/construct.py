"""Memory for a model that was spread over ranks before it had any, on the meta device: only each rank's parts."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def give_memory(model: nn.Module, *, device: torch.device | str, offload: bool = False) -> None:
    """Make the parts of a spread model real, without values; initialise them next.

    Args:
        model: spread by `expertmesh.parallel.apply.parallelize` while it was on the meta device.
        device: the device that computes.
        offload: parameters rest in host memory; buffers are on the device all the same.
    """
    model.to_empty(device="cpu" if offload else device)
    if not offload:
        return
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):  # not spread, so not offloaded
                parameter.data = torch.empty_like(parameter, device=device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
