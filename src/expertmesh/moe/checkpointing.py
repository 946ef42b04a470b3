"""Selective activation checkpointing: the choice of experts is saved, everything else is recomputed.

A recomputed router may choose differently: another kernel, a non-deterministic product before it, a parameter that
changed in between. The backward would then mix two routings. With this policy the recomputation takes the ids, their
order and the drops of the forward, and computes weights, scores and losses again at these ids.
"""

import functools
import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from expertmesh.ops import route_metadata, topk

_aten = torch.ops.aten
CHOOSING_OPERATORS = frozenset(
    {
        # the fused top-k, and the order of rows, in which dropped slots are left out
        topk.OPERATOR,
        route_metadata.OPERATOR,
        # top-k on PyTorch's operators, in custom routers too; the queues of a capacity
        _aten.topk.default,
        _aten.argmax.default,
        _aten.max.dim,
        _aten.multinomial.default,
        _aten.sort.default,
        _aten.sort.stable,
    }
)
"""Operators whose results are saved: those that decide where a token goes."""


def routing_checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of `torch.utils.checkpoint` for one operator: save its result if it chooses experts, else recompute.

    Saved per token: ids and values of the K best (12 K bytes), the int32 metadata (12 K bytes), and with a capacity the
    queue (12 K bytes). The Triton backend's fused top-k saves all scores (4 E bytes) instead of the values. Random
    numbers of noise and drops are drawn again from the same generator state (`preserve_rng_state`).

    Args:
        ctx: the context that torch gives.
        op: the operator whose result could be kept.
        args: the arguments of the operator.
        kwargs: the keyword arguments of the operator.

    Example:
        >>> layer, x = MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2), torch.randn(5, 8, requires_grad=True)
        >>> y, stats = checkpoint(layer, x, use_reentrant=False, context_fn=routing_checkpoint_contexts)
        >>> y.sum().backward()
    """
    if op in CHOOSING_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def warn_of_lost_losses() -> None:
    """Warn if a layer in training runs inside the forward of a reentrant checkpoint.

    That forward runs without gradients. Autograd later gives gradients to tensors that the checkpointed function
    returns itself, but not to tensors inside an object such as RoutingStats. Called when gradients are off in training.
    """
    if torch.compiler.is_compiling():
        return
    forward = CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not forward:
        frame = frame.f_back
    if frame is not None:
        warnings.warn(
            "a MoE layer inside checkpoint(use_reentrant=True): the losses of a RoutingStats have no gradient "
            "outside; use"
            " use_reentrant=False, or let the checkpointed function return aux_loss and z_loss as tensors of their own",
            stacklevel=2,
        )


routing_checkpoint_contexts = functools.partial(create_selective_checkpoint_contexts, routing_checkpoint_policy)
"""Context function of selective checkpointing: `checkpoint(function, *args, use_reentrant=False,
context_fn=routing_checkpoint_contexts)`.
"""
