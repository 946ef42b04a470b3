"""Memory for a model that was built on the meta device; of a sharded one each rank allocates its own shards only."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.parallel.huge_pages import zeros_in_huge_pages


def give_memory(
    model: nn.Module,  # on the meta device, perhaps sharded by `expertmesh.parallel.apply.parallelize`
    *,
    device: torch.device | str,  # the device that computes
    offload: bool = False,  # keep parameters in host memory; buffers are on the device in any case
    in_huge_pages: bool = True,  # whether large tensors on a CPU get pages of 2 MB; not those that are offloaded
) -> None:
    """Allocate the parameters and buffers of a model, as zeros; initialize or read them next."""
    home = torch.device("cpu" if offload else device)
    is_huge = in_huge_pages and home.type == "cpu" and not offload

    def zeros(t: Tensor) -> Tensor:
        if isinstance(t, DTensor):
            local = zeros(t.to_local())
            place = (t.device_mesh, t.placements)
            return DTensor.from_local(local, *place, run_check=False, shape=t.shape, stride=t.stride())
        if is_huge and t.is_contiguous():
            return zeros_in_huge_pages(t.shape, t.dtype)
        return torch.zeros_like(t, device=home)

    with torch.no_grad():
        model._apply(zeros)
    if not offload:
        return
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):  # not sharded, so not offloaded
                parameter.data = torch.empty_like(parameter, device=device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
