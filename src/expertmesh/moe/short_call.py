"""A layer's forward for a few tokens on a CPU: the operations of all stages in a row, without the stages.

With cold caches every function and every small object on the way costs microseconds, and the weights that one token needs
are read in one or two milliseconds. What is here is what `MoELayer.forward` does for its commonest options, to the bit.
"""

from array import array
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.losses import weighted_losses
from expertmesh.moe.router import LinearRouter
from expertmesh.moe.routing import RoutingOptions
from expertmesh.moe.selection import best_columns
from expertmesh.moe.types import RouterOutput, RoutingStats
from expertmesh.ops.dtypes import accumulate_dtype


def may_serve(options: RoutingOptions) -> bool:
    """Whether `forward` knows these options."""
    selection = options.selection
    return (
        options.kind == "topk"
        and options.logit_temperature == 1.0
        and selection.score_function == "softmax"
        and selection.num_expert_groups == 1
        and not selection.batch_invariant
        and selection.backend in ("auto", "torch")
    )


def serves(layer: Any, x: Tensor) -> bool:
    """Whether `forward` may run: no gradients, compiler or profiler, evaluation, few tokens, nothing between the stages.

    Args:
        layer: a MoELayer.
        x: its input.
    """
    if layer.training or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    router, experts = layer.router, layer.experts
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dim() > 0
        and x.shape[-1] == layer.dim
        and type(router) is LinearRouter
        and type(experts) is GroupedExperts
        and type(layer.dispatcher) is LocalDispatcher
        and layer.bias_update_rate == 0
        and layer.eval_capacity_factor is None
        and layer.max_capacity_factor is None
        and layer.shared_experts is None
        and layer.residual_mlp is None
        and not (router._forward_hooks or router._forward_pre_hooks)
        and not (experts._forward_hooks or experts._forward_pre_hooks)
        and not torch.autograd._profiler_enabled()
        and experts.serve_few(x, x.numel() // layer.dim * layer.top_k)
    )


def forward(layer: Any, x: Tensor) -> tuple[Tensor, RoutingStats] | None:
    """What `layer(x)` returns where `serves` says so; None where its experts have too many rows for the short way.

    Args:
        layer: a MoELayer.
        x: its input.
    """
    selection, top_k, losses = layer.routing_options.selection, layer.top_k, layer.loss_options
    x_TD = x.reshape(-1, layer.dim)
    logits_TE = F.linear(x_TD.to(accumulate_dtype(x.dtype)), layer.router.proj.weight)
    scores_TE = logits_TE.softmax(-1)
    ids_TK = best_columns(logits_TE, top_k)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if selection.normalizes(top_k):
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)  # no less than 1 / E
    if selection.weight_scale != 1.0:
        weights_TK = weights_TK * selection.weight_scale
    ids, counts = ids_TK.flatten().tolist(), [0] * layer.num_experts
    for e in ids:
        counts[e] += 1
    # before the experts, whose weights drive all else out of the caches
    counts_E = torch.frombuffer(array("q", counts), dtype=torch.int64)
    none = torch.zeros((), dtype=torch.int64)
    aux_loss = z_loss = weights_TK.new_zeros(())
    if losses.any_wanted:
        aux_loss, z_loss, _ = weighted_losses(
            RouterOutput(ids_TK, weights_TK, scores_TE, logits_TE),
            None,
            layer.num_experts,
            losses,
            sum_over_processes=layer.dispatcher.sum_over_processes,
        )
    stats = RoutingStats(aux_loss, z_loss, counts_E, none, ids_TK, weights_TK)
    y_TD = layer.experts.run_few(x_TD, ids_TK, weights_TK, ids=ids)
    return None if y_TD is None else (y_TD.view(x.shape), stats)
