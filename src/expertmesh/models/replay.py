"""Replay of expert choices: MoE layers of a model compute with given experts, in the place of their routers' choice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from expertmesh.moe.types import Routing


@contextmanager
def replaying(model: Any, ids_TK: Sequence[Tensor]) -> Iterator[None]:
    """Context in which MoE layers use the given expert ids; routing weights are computed at these experts.

    Args:
        ids_TK: (T, K) int64 expert ids of each MoE layer in order, the number of its experts where there is none.
    """
    handles = []
    layers = [block.moe for block in model.layers if block.moe is not None]
    try:
        for layer, ids in zip(layers, ids_TK, strict=True):
            hook = partial(_with_routing, Routing(ids))
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_routing(
    routing: Routing, layer: nn.Module, args: tuple[Any, ...], call: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, call | {"routing": routing}
