"""Expert offload: parameters rest in host memory, are copied to the device for each gather, and gradients are copied
back.

On a CPU the copies are made as well, so that the code is tested without a GPU. On a GPU host memory is pinned, and
copies use a stream of their own, so they overlap with computation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_HOST = torch.device("cpu")


def compute_device(device_type: str) -> torch.device:
    """Device of this process."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


class HostMemory:
    """Copies tensors between host memory and the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def rest(self, tensor: Tensor) -> Tensor:
        """Permanent copy in host memory, pinned on GPU machines; a meta tensor stays a meta tensor."""
        if tensor.is_meta:
            return tensor.clone(memory_format=torch.contiguous_format)
        pin = self._stream is not None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST, pin_memory=pin)
        return copy.copy_(tensor)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Pinned copy of a host tensor; the tensor itself if it is pinned, or without a GPU."""
        return tensor if self._stream is None or tensor.is_pinned() else tensor.pin_memory()

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy on the device in a dtype; on a GPU asynchronous, on the stream of `copying`."""
        copy = tensor.detach().to(self.device, non_blocking=True, copy=True)
        return copy.to(dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy in host memory; the host waits for it, because an optimizer may read it next."""
        return tensor.to(_HOST, copy=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context whose copies and collectives run on the copy stream, without waiting for the computation."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def joined(self, tensor: Tensor) -> Tensor:
        """Tensor that was launched under `copying`, synchronized with the computing stream."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self._stream)
            tensor.record_stream(computing)
        return tensor


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """CPU mesh of the same ranks and groups; the groups need a CPU backend."""
    if mesh.device_type == _HOST.type:
        return mesh
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, _HOST.type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
