"""Base of modules with buffers that no checkpoint has: their values are there after the meta device too."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ConstantBuffers(nn.Module):
    """A module that fills its non-persistent buffers again when they get memory.

    `to_empty` gives them memory without values, and `load_state_dict(assign=True)` leaves them on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_give_memory)

    def fill_constants(self) -> None:
        """Fill the non-persistent buffers."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ConstantBuffers":
        had_memory = not _without_memory(self)
        super()._apply(fn, recurse)
        if not (had_memory or _without_memory(self)):
            self.fill_constants()
        return self


def _without_memory(module: nn.Module) -> list[str]:
    """Names of the module's own non-persistent buffers on the meta device."""
    own = module._buffers
    return [
        name for name in module._non_persistent_buffers_set if (buffer := own.get(name)) is not None and buffer.is_meta
    ]


@torch.no_grad()
def _give_memory(module: nn.Module, _: object) -> None:
    """Move constant buffers to where `load_state_dict` has put the parameters."""
    assert isinstance(module, ConstantBuffers)
    names = _without_memory(module)
    device = next((p.device for p in module.parameters() if not p.is_meta), None)
    if names and device is not None:
        for name in names:
            module._buffers[name] = torch.empty_like(module.get_buffer(name), device=device)
        module.fill_constants()
