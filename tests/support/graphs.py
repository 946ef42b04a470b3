"""A graph of work as a GPU's, without one: operators are recorded with their tensors, and replayed on the same
memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_READING = frozenset({_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.bincount})


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in _READING, f"{func}: the host cannot read in a capture"
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found


class RecordedGraph:
    """See `expertmesh.engine.captured.CudaGraph`: what the host decides while it is captured is fixed; `num_replays`
    counts."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self.num_replays = 0

    def capture(self, compute: Any) -> Any:
        """Run twice, as a GPU's graph does: once to warm up, once recorded."""
        compute()
        with _Recorder(self._calls):
            return compute()

    def replay(self) -> None:
        """Run the operators again; their results go where they went."""
        self.num_replays += 1
        for func, args, kwargs, known in self._calls:
            own = {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for old, new in zip(tree_leaves(known), tree_leaves(func(*args, **kwargs)), strict=True):
                is_elsewhere = isinstance(old, Tensor) and id(old) not in own
                if is_elsewhere and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedGraphs:
    """Makes them, and counts them as `made`."""

    def __init__(self) -> None:
        self.made: list[RecordedGraph] = []

    def __call__(self) -> RecordedGraph:
        """An empty one."""
        self.made.append(RecordedGraph())
        return self.made[-1]

    def num_bytes(self) -> int:
        """A kilobyte each."""
        return 1024 * len(self.made)
