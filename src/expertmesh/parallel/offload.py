"""Experts that rest in host memory: copied to the compute device for each gather, gradients copied back.

On a CPU the host's memory is the device's, too, and the copies are made all the same: so the code is tested where
there is no GPU. On a GPU host memory is pinned, and copies to the device have a stream of their own, so that they run
beside the computation.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_HOST = torch.device("cpu")


def compute_device(device_type: str) -> torch.device:
    """Where this process computes."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


class HostMemory:
    """Moves tensors between where they rest and where they are computed with.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def rest(self, tensor: Tensor) -> Tensor:
        """A copy in host memory for as long as the model lives; of a meta tensor, nothing but its shape."""
        if tensor.is_meta:
            return tensor.clone(memory_format=torch.contiguous_format)
        pin = self._stream is not None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST, pin_memory=pin)
        return copy.copy_(tensor)

    def pinned(self, tensor: Tensor) -> Tensor:
        """The same in pinned memory, if there is a GPU and it is not."""
        return tensor if self._stream is None or tensor.is_pinned() else tensor.pin_memory()

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy on the device, in another type; on a GPU under way on the stream of `copying`."""
        copy = tensor.detach().to(self.device, non_blocking=True, copy=True)
        return copy.to(dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory; the host waits for it, because an optimiser may read it next."""
        return tensor.to(_HOST, copy=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies and collectives launched here do not wait for the computation."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def joined(self, tensor: Tensor) -> Tensor:
        """The same tensor, launched under `copying`, for use by the computation."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self._stream)
            tensor.record_stream(computing)
        return tensor


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks and groups for tensors in host memory; the groups need a backend for the CPU."""
    if mesh.device_type == _HOST.type:
        return mesh
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return DeviceMesh.from_group(
        groups, _HOST.type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )
