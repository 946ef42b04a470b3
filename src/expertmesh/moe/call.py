"""One call of a layer: its arguments checked, flattened and joined with what the layer says for all calls."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from expertmesh.moe.assignment import Assignment, CapacityOptions, all_kept, assign, priority_of
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.groups_over_ranks import SharedGroups, SharedTokens, assign_shared
from expertmesh.moe.random import (
    STREAM_OUTPUT_MASK,
    first_index,
    fresh_key,
    random_bits,
    uniform,
)
from expertmesh.moe.types import RouterOutput, Routing, RoutingStats
from expertmesh.moe.validation import (
    check_call_factor,
    check_input,
    check_routing,
    check_top_k,
    flat_argument,
    python_number,
)
from expertmesh.ops.transforms import refuse_transforms


@dataclass(frozen=True)
class CallInputs:
    """One call of a layer, checked and flattened.

    Attributes:
        x_TD: tokens; zero where masked.
        token_mask_T: True for real tokens, or None.
        token_ids_T: vocabulary ids, or None.
        given_index_T: int64 global indices of the tokens, or None: one after the other.
        routing: a choice to replay, or None.
        top_k: K in force.
        training: whether noise, jitter and dropout are on.
        noise_key: (2,) int64 key of the random numbers.
        noise_samples: (2,) int64, see `first_index`; None: tokens count from 0.
        layer_index: which layer of a model this is.
        expert_bias_E: the balancing bias, or None.
        group_size: tokens per routing group, or None.
        choice_factor: capacity factor of expert-choice routing, (numerator, denominator).
        capacity: what drops choices in this call; None: nothing does.
        groups: routing groups that other processes share, or None.
        output_masking: probability with which a row's output is left out in this call.
    """

    x_TD: Tensor
    token_mask_T: Tensor | None
    token_ids_T: Tensor | None
    given_index_T: Tensor | None
    routing: Routing | None
    top_k: int
    training: bool
    noise_key: Tensor
    noise_samples: Tensor | None
    layer_index: int
    expert_bias_E: Tensor | None
    group_size: int | None
    choice_factor: tuple[int, int]
    capacity: CapacityOptions | None
    groups: SharedGroups | None
    output_masking: float

    @property
    def capacity_factor(self) -> float | None:
        """In force in this call; None: nothing is dropped for a capacity."""
        factor = None if self.capacity is None else self.capacity.factor
        return None if factor is None else factor[0] / factor[1]

    @property
    def token_index_T(self) -> Tensor:  # noqa: N802
        """Int64 global indices of the tokens; made when asked for, which is for random numbers only."""
        if self.given_index_T is not None:
            return self.given_index_T
        index_T = torch.arange(self.x_TD.shape[0], device=self.x_TD.device)
        if self.noise_samples is None:
            return index_T
        return index_T + first_index(len(index_T), self.noise_samples)

    def bits(self, num_columns: int, stream: int) -> Tensor:
        """(T, num_columns) random 32-bit integers of one stream."""
        return random_bits(
            self.noise_key,
            self.token_index_T,
            num_columns,
            layer_index=self.layer_index,
            stream=stream,
        )

    def assign(self, routed: RouterOutput, *, num_experts: int) -> Assignment:
        """Apply the capacity to the choices, and mask outputs; expert-choice routing has applied its own capacity."""
        assigned = self._kept(routed, num_experts)
        p, weights_TK = self.output_masking, assigned.weights_TK
        if p == 0.0:
            return assigned
        # An output of weight 0 is no output, and reaches neither the expert nor the router backward.
        u_TK = uniform(self.bits(weights_TK.shape[1], STREAM_OUTPUT_MASK), weights_TK.dtype)
        return replace(assigned, weights_TK=weights_TK * (u_TK >= p) / (1.0 - p))

    def _kept(self, routed: RouterOutput, num_experts: int) -> Assignment:
        chosen = (routed.topk_expert_ids_TK, routed.topk_weights_TK)
        if self.capacity is None:
            return all_kept(*chosen)
        decide = assign if self.groups is None else partial(assign_shared, groups=self.groups)
        return decide(
            *chosen,
            num_experts=num_experts,
            options=self.capacity,
            token_mask_T=self.token_mask_T,
            noise_key=self.noise_key,
            token_index_T=self.token_index_T,
            layer_index=self.layer_index,
            priority_T=priority_of(routed, self.capacity),
        )


def call_of(
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
) -> CallInputs:
    """Check and flatten the arguments of `MoELayer.forward`, whose docstring has their meanings.

    Args:
        layer: the MoELayer that is called.
        x: (..., D) its input.
        token_mask: see there, as for all that follow.
        token_ids: see there.
        token_index: see there.
        routing: see there.
        top_k: see there.
        capacity_factor: see there.
        shared_tokens: see there.

    Raises:
        ConfigError: an argument does not fit the layer.
    """
    refuse_transforms("a MoE layer", lambda: (x, *layer.parameters()))
    grouped = layer.experts if isinstance(layer.experts, GroupedExperts) else None
    check_input(
        x,
        dim=layer.dim,
        # a hook of accelerate brings weights from the disk when the experts are called
        weight=None if grouped is None or hasattr(grouped, "_hf_hook") else grouped.w_in,
        device=None if grouped is None else grouped.compute_device,
    )
    training, E = layer.training, layer.num_experts
    top_k, capacity_factor = python_number(top_k), python_number(capacity_factor)
    check_call_factor(capacity_factor, arithmetic=layer.arithmetic.in_mode(training))
    if top_k is not None:
        check_top_k(top_k, E)
    mask_T, ids_T, index_T = (
        None if value is None else flat_argument(name, value, x, boolean=name == "token_mask")
        for name, value in (
            ("token_mask", token_mask),
            ("token_ids", token_ids),
            ("token_index", token_index),
        )
    )
    index_T = None if index_T is None else index_T.to(torch.int64)
    x_TD = x.reshape(-1, layer.dim)
    if mask_T is not None:
        x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
    if isinstance(routing, RoutingStats):
        routing = Routing(routing.topk_expert_ids_TK)
    if routing is not None:
        check_routing(
            routing, num_tokens=x_TD.shape[0], num_experts=E, top_k=top_k, device=x.device
        )
        top_k = routing.expert_ids_TK.shape[1]
    rule = layer.capacity_rule
    capacity = rule.in_call(capacity_factor, training=training)
    random_drop = capacity is not None and capacity.policy == "random"
    masking = layer.options.expert_output_masking if training else 0.0
    draws = masking > 0 or (training and (random_drop or layer.routing_options.needs_noise))
    return CallInputs(
        x_TD=x_TD,
        token_mask_T=mask_T,
        token_ids_T=ids_T,
        given_index_T=index_T,
        routing=routing,
        top_k=layer.top_k if top_k is None else top_k,
        training=training,
        noise_key=fresh_key(x.device) if draws and not layer.noise_is_keyed else layer.noise_key,
        noise_samples=layer.noise_samples if layer.noise_is_keyed else None,
        layer_index=layer.layer_index,
        expert_bias_E=layer.expert_bias_E,
        group_size=rule.group_size,
        choice_factor=rule.choice_factor(capacity_factor, training=training),
        capacity=capacity,
        groups=None if shared_tokens is None else SharedGroups(shared_tokens, index_T),
        output_masking=masking,
    )
