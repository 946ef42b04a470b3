"""Which operators run, and which tensors they make."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Notes every operator that runs inside it, in their order, as `ran`."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        self.ran.append(func)
        return func(*args, **(kwargs or {}))


class NewTensors(TorchDispatchMode):
    """Notes the tensors that operators make in memory of their own, so no views, as `made`: shape, and elements of the
    memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Size, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and _storage(t) not in known:
                known.add(_storage(t))
                self.made.append((t.shape, t.untyped_storage().nbytes() // t.itemsize))
        return result


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
