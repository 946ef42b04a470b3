"""A stand-in for a second device where there is none: no operator may mix what rests on the host with the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.parallel.experts import storage
from expertmesh.parallel.offload import HostMemory


class TwoDevices(TorchDispatchMode):
    """Follows which storages are the host's, and notes each operator that has host tensors and others.

    A tensor is the host's if `HostMemory` put it there or it was made of host tensors; what `HostMemory` copies to the
    device is not. As on real devices, tensors without dimensions mix with everything.

    Attributes:
        mixed: names of operators that mixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.UntypedStorage] = {}
        self.mixed: list[str] = []

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is the host's."""
        return _storage(tensor)._cdata in self._host

    def put(self, tensor: Tensor, *, on_host: bool) -> Tensor:
        """Say where a tensor is."""
        storage = _storage(tensor)
        if on_host:
            self._host[storage._cdata] = storage  # held, so that no other takes its place
        else:
            self._host.pop(storage._cdata, None)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and note where its results are."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {self.is_host(t) for t in given if t.dim()}
        if len(places) > 1:
            self.mixed.append(str(func))
        known = {_storage(t)._cdata for t in given}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage(tensor)._cdata not in known:
                self.put(tensor, on_host=places == {True})
        return result


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Watch all operators, and all that `HostMemory` moves."""
    watch = TwoDevices()

    class Watched(HostMemory):
        def rest(self, tensor: Tensor) -> Tensor:
            return watch.put(super().rest(tensor), on_host=True)

        def to_host(self, tensor: Tensor) -> Tensor:
            return watch.put(super().to_host(tensor), on_host=True)

        def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
            copy = super().to_device(tensor, dtype)
            shared = copy.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            return copy if shared else watch.put(copy, on_host=False)

    with patch.object(storage, "HostMemory", Watched), watch:
        yield watch
