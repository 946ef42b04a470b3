"""Arguments of one call of the layer: checked, flattened and joined with the layer's options and state."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.moe_rules import LayerOptions
from expertmesh.config.values import python_number
from expertmesh.moe.capacity import Ratio, assign, drop_factor, drop_policy
from expertmesh.moe.check_arguments import (
    TOKENS,
    check_call_factor,
    check_input,
    check_routing,
    check_top_k,
)
from expertmesh.moe.groups_over_ranks import SharedGroups, SharedTokens, assign_shared
from expertmesh.moe.routing_noise import (
    STREAM_OUTPUT_MASK,
    first_index,
    fresh_key,
    random_bits,
    uniform,
)
from expertmesh.moe.selection import scores_of, weights_at
from expertmesh.moe.types import Routing, RoutingStats
from expertmesh.ops.check import check_tensors
from expertmesh.ops.op_set import OpSet
from expertmesh.ops.transforms import refuse_transforms


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one call of the layer, checked and flattened, with the layer's options and state."""

    options: LayerOptions  # the layer's options
    x_TD: Tensor  # tokens; masked ones are zero
    token_mask_T: Tensor | None  # True for real tokens, or None
    token_ids_T: Tensor | None  # vocabulary ids, or None
    given_index_T: Tensor | None  # int64 global indices of the tokens; None: consecutive
    routing: Routing | None  # a choice to replay, or None
    top_k: int  # K of this call
    training: bool  # whether noise, jitter and dropout are on
    arithmetic: OpSet  # op set of this call
    noise_key: Tensor  # (2,) int64 key of the random numbers
    noise_samples: Tensor | None  # (2,) int64, see `first_index`; None: tokens count from 0
    expert_bias_E: Tensor | None  # the balancing bias, or None
    given_factor: float | None  # the capacity factor given for this call, or None
    # capacity factor by which choices are dropped, (numerator, denominator); None: dropless
    drop_factor: Ratio | None
    groups: SharedGroups | None  # routing groups shared with other processes, or None
    losses: bool  # whether the caller wants losses and counts

    @property
    def capacity_factor(self) -> float | None:
        """Capacity factor by which choices are dropped in this call; None: dropless."""
        factor = self.drop_factor
        return None if factor is None else factor[0] / factor[1]

    @property
    def token_index_T(self) -> Tensor:  # noqa: N802
        """Int64 global indices of the tokens. Made on first use, because only random numbers need them."""
        if self.given_index_T is not None:
            return self.given_index_T
        index_T = torch.arange(self.x_TD.shape[0], device=self.x_TD.device)
        if self.noise_samples is None:
            return index_T
        return index_T + first_index(len(index_T), self.noise_samples)

    def bits(self, num_columns: int, stream: int) -> Tensor:
        """(T, num_columns) random 32-bit integers of one random stream."""
        return random_bits(
            self.noise_key,
            self.token_index_T,
            num_columns,
            layer_index=self.options.layer_index,
            stream=stream,
        )

    def _before_division(self, routing: Routing) -> Tensor | None:
        """(T, K) weights of the choices before they are divided by their sum, where that follows the drops; else
        None."""
        given = None if self.routing is None else self.routing.weights_TK
        if self.options.normalize_weights != "kept" or routing.logits_TE is None or given is not None:
            return None
        how: dict[str, Any] = {"options": self.options, "arithmetic": self.arithmetic}
        logits_TE = routing.logits_TE.detach()
        return weights_at(logits_TE, scores_of(logits_TE, **how), routing.expert_ids_TK, normalize=False, **how)

    def kept(self, routing: Routing) -> Routing:
        """Apply the capacity and the output masking to the choices. Expert-choice routing has applied its own
        capacity."""
        options, factor = self.options, self.drop_factor
        policy = drop_policy(options, training=self.training)
        if factor is None:
            zero = torch.zeros((), dtype=torch.int64, device=routing.expert_ids_TK.device)
            routing = replace(routing, num_dropped=zero)
        else:
            decide = assign if self.groups is None else partial(assign_shared, groups=self.groups)
            routing = decide(
                routing,
                num_experts=options.num_experts,
                factor=factor,
                min_capacity=options.min_capacity,
                policy=policy,
                ranked_TK=self._before_division(routing) if policy == "weight" else None,
                group_size=options.routing_group_size,
                renormalize=options.normalize_weights == "kept",
                token_mask_T=self.token_mask_T,
                noise_key=self.noise_key,
                token_index_T=self.token_index_T,
                layer_index=options.layer_index,
            )
        p, weights_TK = options.expert_output_masking if self.training else 0.0, routing.weights_TK
        if p == 0.0 or weights_TK is None:
            return routing
        # With weight 0, no gradient reaches the expert or the router from this output.
        u_TK = uniform(self.bits(weights_TK.shape[1], STREAM_OUTPUT_MASK), weights_TK.dtype)
        return replace(routing, weights_TK=weights_TK * (u_TK >= p) / (1.0 - p))


def make_layer_call(
    layer: Any,
    x: Tensor,
    *,
    token_mask: Tensor | None,
    token_ids: Tensor | None,
    token_index: Tensor | None,
    routing: Routing | RoutingStats | None,
    top_k: int | None,
    capacity_factor: float | None,
    shared_tokens: SharedTokens | None,
    losses: bool,
) -> LayerCall:
    """Check and flatten the arguments of `MoELayer.forward`, whose docstring has their meanings."""
    refuse_transforms("a MoE layer", lambda: (x, *layer.parameters()))
    grouped = layer.grouped
    # with accelerate's hook, weights are loaded from disk when the experts are called
    is_typed = grouped and grouped.format == "dense" and not hasattr(grouped, "_hf_hook")
    check_input(
        x,
        dim=layer.dim,
        weight=grouped.w_in if is_typed else None,
        device=None if grouped is None else grouped.compute_device,
    )
    training, E = layer.training, layer.num_experts
    top_k, capacity_factor = python_number(top_k), python_number(capacity_factor)
    options, arithmetic = layer.options, layer.arithmetic.in_mode(training)
    check_call_factor(capacity_factor, arithmetic=arithmetic)
    if top_k is not None:
        # replayed choices were limited by the groups of their own router
        num_groups = options.num_expert_groups if routing is None else 1
        check_top_k(top_k, E, num_groups=num_groups, num_limited_groups=options.num_limited_groups)
    tokens = {"token_mask": token_mask, "token_ids": token_ids, "token_index": token_index}
    x_TD = x.reshape(-1, layer.dim)
    sizes = {"*": x.shape[:-1], "T": x_TD.shape[0]}
    check_tensors(TOKENS, tokens, sizes, device=x.device)
    mask_T, ids_T, index_T = (None if value is None else value.reshape(-1) for value in tokens.values())
    index_T = None if index_T is None else index_T.to(torch.int64)
    if mask_T is not None:
        x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
    if isinstance(routing, RoutingStats):
        routing = Routing(routing.topk_expert_ids_TK)
    if routing is not None:
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=E, top_k=top_k, device=x.device)
        top_k = routing.expert_ids_TK.shape[1]
    factor = drop_factor(options, capacity_factor, training=training)
    random_drop = factor is not None and drop_policy(options, training=training) == "random"
    masks = training and options.expert_output_masking > 0
    draws = masks or (training and (random_drop or options.needs_noise))
    return LayerCall(
        options=options,
        x_TD=x_TD,
        token_mask_T=mask_T,
        token_ids_T=ids_T,
        given_index_T=index_T,
        routing=routing,
        top_k=layer.top_k if top_k is None else top_k,
        training=training,
        arithmetic=arithmetic,
        noise_key=fresh_key(x.device) if draws and not layer.noise_is_keyed else layer.noise_key,
        noise_samples=layer.noise_samples if layer.noise_is_keyed else None,
        expert_bias_E=layer.expert_bias_E,
        given_factor=capacity_factor,
        drop_factor=factor,
        groups=None if shared_tokens is None else SharedGroups(shared_tokens, index_T),
        losses=losses,
    )
