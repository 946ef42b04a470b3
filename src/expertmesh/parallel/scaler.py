"""Loss scaling for gradients that are sharded over ranks and devices."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh.parallel.ranks import Ranks


class LossScaler(torch.amp.GradScaler):
    """PyTorch's loss scaler (Micikevicius et al. 2018, 3.2), with one scale for all ranks.

    Each rank checks its own shards. If one finds an overflow, all ranks skip the step and halve the scale.

    Args:
        enabled: whether losses are scaled; if not, the scale is 1.
    """

    def __init__(self, device_type: str, *, enabled: bool, ranks: Ranks | None = None) -> None:
        super().__init__(device_type, enabled=enabled)
        self._ranks = Ranks() if ranks is None else ranks

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        # torch's version passes DTensors of several meshes to one operator, which refuses them.
        parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    part = grad.to_local() if isinstance(grad, DTensor) else grad
                    parts.setdefault((part.device, part.dtype), []).append(part)
        for (device, _), gradients in parts.items():
            found = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(device))
            found_inf.copy_(found)
        self._ranks.sum_(found_inf, what="overflows")
        return {found_inf.device: found_inf}
