"""The mixture-of-experts layer: route -> assign -> dispatch -> experts -> combine (+ shared)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import LayerOptions, RouterKind
from expertmesh.moe.build import (
    make_experts,
    make_residual,
    make_router,
    make_shared_experts,
    make_shared_gate,
)
from expertmesh.moe.check_arguments import check_draw, check_dtype, check_parts
from expertmesh.moe.checkpointing import warn_of_lost_losses
from expertmesh.moe.constant_buffers import ConstantBuffers
from expertmesh.moe.dense_parts import add_dense, dense_parts
from expertmesh.moe.dispatch import (
    Dispatched,
    LocalDispatcher,
    TokenDispatcher,
    dispatch_options,
)
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.groups_over_ranks import SharedTokens
from expertmesh.moe.keywords import KEYWORDS, check_keywords, signature_with
from expertmesh.moe.large_sizes import names_large_sizes
from expertmesh.moe.layer_call import LayerCall, make_layer_call
from expertmesh.moe.losses import weighted_losses
from expertmesh.moe.phases import phase
from expertmesh.moe.reset import reset_layer
from expertmesh.moe.router import keep_full_precision
from expertmesh.moe.routing import route
from expertmesh.moe.types import Routing, RoutingStats
from expertmesh.ops.check import Arg, check_tensor
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.op_set import select_op_set

_COUNTS = Arg("E", None, "RoutingStats.num_tokens_per_expert_E, summed over calls")


class MoELayer(ConstantBuffers):
    """A mixture-of-experts layer: each token passes the K of E experts that a router chooses for it.

    Parameters, by their names in `state_dict()`: `router.proj.weight` (E, D), `experts.w_in` (E, G, F, D) with G = 2
    (gate, up) for gated activations and 1 otherwise, `experts.w_out` (E, D, F), with bias `experts.b_in` (E, G, F)
    and `experts.b_out` (E, D). Optional: `shared_experts.*`, `shared_gate.*`, `residual_mlp.*`,
    `residual_coefficient.*`. Buffers: `expert_bias_E` (with bias_update_rate) and `router.hash_key` (hash router). The
    router and the balancing bias stay FP32 (FP64 in an FP64 layer) whatever the layer's dtype, also after
    `layer.to(torch.bfloat16)`.

    Args:
        dim: size of a token (D).
        hidden_dim: hidden size of one expert (F).
        num_experts: E.
        top_k: experts per token (K), from 1 to E.
        router: "topk" (linear), "cosine" (cosine of a projection with expert embeddings), "expert_choice" (experts
            choose tokens), "hash" (by token id, nothing learned), or an nn.Module of your own. Its forward takes x_TD,
            and any of `token_mask_T`, `token_ids_T`, `token_index_T`, `top_k` by name. It returns logits (T, E), to
            which the options below apply, or a RouterOutput, which is used as it is.
        score_function: "softmax" over all experts, "sigmoid", or "softmax_after_topk" (over the chosen logits).
        normalize_weights: divide the weights by their sum over the chosen experts ("topk") or over the experts that the
            capacity kept ("kept"); "none"; "auto": topk if top_k > 1, and none for expert_choice.
        weight_scale: factor on the routing weights.
        router_noise: "gumbel" or "gaussian" noise on the logits in training, or "gumbel_after_first", which leaves the
            best logit best. Noise affects the choice only: weights and losses come from the clean logits (as in
            DeepSpeed's RSample), so replaying the choice replays the weights.
        router_noise_std: factor on the noise, in logits.
        input_jitter: half-width of a uniform factor around 1 on the router's input, in training.
        input_dropout: dropout probability on the router's input, in training.
        expert_output_masking: probability p with which the output of a (token, expert) row is zeroed in training; other
            outputs are scaled by 1 / (1 - p). (NLLB's expert output masking scales by 1 - p in evaluation instead.)
            Masked rows count for the capacity.
        logit_temperature: divisor of the logits.
        num_expert_groups: groups of consecutive experts for group-limited routing; 1: no limit.
        num_limited_groups: number of groups that a token may use, the best ones.
        group_score: score of a group: "top2_sum", the sum of its two best scores, or "max", the best one.
        bias_update_rate: step of `update_expert_bias`. Above 0 the layer has the buffer `expert_bias_E`, which is added
            to the scores for the choice only.
        cosine_dim: size of the space in which the cosine router compares.
        capacity_factor: rows per expert and routing group in training, as a ratio of the even share K * T_g / E;
            None (or inf): dropless. For expert_choice None is 1.
        eval_capacity_factor: the capacity factor in evaluation.
        min_capacity: least rows per expert and routing group when a capacity is set.
        max_capacity_factor: upper bound on the factor, for a dropless layer as well; None: no bound.
        drop_policy: order in which choices get an expert's capacity: "first" (all first choices in token order, then
            all second ones), "priority" (the same with tokens in order of their largest probability: batch-prioritised
            routing; of their largest routing weight where the router has no probabilities, "hash"), "weight" (choices
            by routing weight; of `normalize_weights="kept"` before the division) or "random" (in training; "first" in
            evaluation). Ties are in the order of "first".
        routing_group_size: tokens per routing group, for capacity and losses; None: all tokens of a call.
        experts: an nn.ModuleList of E modules of your own, or a function from the expert's index to a module; each is
            called on its (n, D) rows. They synchronise with the host. None: grouped experts.
        activation: the activation of the experts, the shared experts and the residual MLP.
        bias: whether these MLPs have biases.
        router_bias: whether the router has a bias, learned like its weight (gpt-oss).
        num_shared_experts: number of shared experts: one dense MLP with this many times hidden_dim.
        shared_hidden_dim: hidden size of the shared experts; None: num_shared_experts * hidden_dim.
        shared_gate: multiply the shared experts' output by sigmoid(g . x) per token, with a learned g (Qwen2-MoE).
        residual: PR-MoE's residual layer, y = a * MoE(x) + b * MLP(x) with (a, b) = softmax(W_c x + b_c) (arXiv
            2201.05596, section 4.1.2). Shared experts are added outside.
        residual_hidden_dim: hidden size of the residual MLP; None: hidden_dim.
        recompute_h: recompute the pre-activations of grouped experts (T * K * G * F elements) in the backward instead
            of saving them. Costs two thirds of their forward's FLOPs more (half, if not gated); bitwise the same
            results.
        balance_loss: "switch" (over all choices), "gshard" (over first choices only), "importance_load" or "none".
        balance_loss_scope: "group": per routing group, then averaged; "global": over all tokens of the call, and of the
            micro-batches before it inside `expertmesh.moe.batch_balance.BatchBalance`, which the trainer uses.
        aux_loss_weight: weight of the balance loss in `RoutingStats.aux_loss`.
        z_loss_weight: weight of the router z-loss in `RoutingStats.z_loss`.
        dispatcher: sends tokens to other processes; None: all experts are on this one. `expertmesh.parallel` sets it.
        backend: implementation of the operators: "auto" (triton on GPUs that it supports, else torch), "triton",
            "torch" or "reference"; see `expertmesh doctor`.
        batch_invariant: a token's output and routing in evaluation are bitwise the same in every batch, at the price of
            speed. No effect in training. Refused where the result depends on the batch by definition (a capacity in
            evaluation, expert_choice), and for custom routers, custom experts and the "reference" backend. A dispatcher
            must preserve it. See docs/numerics.md, section 6.
        seed: the seed of the initial weights and the hash; None: drawn from torch's default generator.
        layer_index: number of the layer in its model; initial weights and noise depend on it.
        device: the device of the parameters; "meta" allocates none.
        dtype: the type of all parameters except the router's; None: torch's default.

    Raises:
        ConfigError: an option breaks a rule; one line with the value, the rule and the fix.

    Example:
        >>> import torch
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2)
        >>> y, stats = layer(torch.randn(2, 5, 8))
        >>> (y.square().mean() + stats.aux_loss + stats.z_loss).backward()
        >>> y.shape, stats.num_dropped.item()
        (torch.Size([2, 5, 8]), 0)
    """

    noise_key: Tensor
    noise_samples: Tensor
    expert_bias_E: Tensor | None

    @names_large_sizes
    def __init__(
        self,
        *,
        router: RouterKind | nn.Module = "topk",
        experts: nn.ModuleList | Callable[[int], nn.Module] | None = None,
        dispatcher: TokenDispatcher | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """Build and initialise the layer; see the class for the arguments."""
        check_keywords(options, known=KEYWORDS)
        check_parts(router, experts, options["num_experts"])
        check_dtype(dtype)
        own_router = isinstance(router, nn.Module)
        options["router"] = "topk" if own_router else router
        checked = LayerOptions(own_router=own_router, own_experts=experts is not None, **options)
        super().__init__()
        self.dispatcher: TokenDispatcher = LocalDispatcher() if dispatcher is None else dispatcher
        self._build(checked, router, experts, device, dtype)
        reset_layer(self, checked.seed, std=None, out_std=None, custom=False)

    def _build(
        self,
        options: LayerOptions,
        router: str | nn.Module,
        experts: nn.ModuleList | Callable[[int], nn.Module] | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the submodules and buffers."""
        self.options = options
        self.dim, self.num_experts, self.top_k = options.dim, options.num_experts, options.top_k
        self.layer_index = options.layer_index
        self.arithmetic = select_op_set(options.batch_invariant)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if not isinstance(router, nn.Module):
            router = make_router(options, **place)
        self.router: nn.Module = router
        self.experts = make_experts(options, experts, **place)
        self.shared_experts = make_shared_experts(options, **place)
        self.shared_gate = make_shared_gate(options, **place)
        self.residual_mlp, self.residual_coefficient = make_residual(options, **place)
        exact = accumulate_dtype(dtype or torch.get_default_dtype())
        bias_E = torch.zeros(self.num_experts, device=device, dtype=exact)
        self.register_buffer("expert_bias_E", bias_E if options.bias_update_rate else None)
        key = torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("noise_key", key, persistent=False)
        self.register_buffer("noise_samples", torch.zeros_like(key), persistent=False)
        self.noise_is_keyed = False
        self.earlier_sums_RE: Tensor | None = (
            None  # sums of earlier micro-batches, see `BatchBalance`; no buffer, which casts would round
        )

    @property
    def grouped(self) -> GroupedExperts | None:
        """The experts, if they are stacked tensors in any format; None: they are modules of the user's."""
        return self.experts if isinstance(self.experts, GroupedExperts) else None

    @classmethod
    def from_config(cls, moe: MoEConfig, *, residual_hidden_dim: int | None = None, **own: Any) -> "MoELayer":
        """Build one layer of a model from its configuration.

        Args:
            moe: the options of all layers with experts.
            residual_hidden_dim: hidden size of the residual MLP, if the options ask for one.
            **own: keywords of this class that `moe` does not have: dim, num_experts, activation, layer_index, ...
        """
        if moe.residual:
            own["residual_hidden_dim"] = residual_hidden_dim
        return cls(**own, **moe.model_dump(exclude={"num_experts"}))

    def reset_parameters(
        self, seed: int | None = None, *, std: float | None = None, out_std: float | None = None
    ) -> None:
        """Reinitialise every parameter, custom modules' too, and reset the balancing bias and the noise key.

        Values depend on (seed, layer_index, parameter name, expert) only: the same on any device, after construction on
        the meta device, and on any number of ranks. Biases become zero. Custom routers and experts are reset by the
        `reset_parameters` of their submodules.

        Args:
            seed: None: the one given at construction, else a fresh one from torch's default generator.
            std: standard deviation of all matrices; None: 1 / sqrt(fan_in).
            out_std: standard deviation of the matrices back to D (w_out); None: std's rule.

        Raises:
            ConfigError: the seed is no integer of 64 bits, or a deviation is negative or not finite.
        """
        check_draw(seed, std=std, out_std=out_std)
        out_std = std if out_std is None else out_std
        seed = self.options.seed if seed is None else seed
        reset_layer(self, seed, std=std, out_std=out_std, custom=True)

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Reset the noise key and the samples."""
        self.noise_key.zero_()
        self.noise_samples.zero_()
        self.noise_is_keyed = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoELayer":
        before = self.expert_bias_E
        super()._apply(fn, recurse)
        if before is not None:
            self.expert_bias_E = keep_full_precision(fn)(before)
        return self

    def extra_repr(self) -> str:
        """Options shown by print(layer), on one line."""
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"router={self.options.router_kind}, capacity_factor={self.options.capacity_factor}"
        )

    @torch.no_grad()
    def update_expert_bias(self, num_tokens_per_expert_E: Tensor) -> None:
        """Aux-loss-free balancing: bias_e += rate * sign(mean load - load_e) (DeepSeek, arXiv 2408.15664, alg. 1).

        Call it once per optimizer step with the counts of all micro-batches and all ranks. Does nothing when
        bias_update_rate is 0. Does not synchronise.

        Args:
            num_tokens_per_expert_E: (E,) tokens per expert, as in RoutingStats.

        Raises:
            ConfigError: the counts are no tensor, or have another shape.
        """
        if self.expert_bias_E is None:
            return
        name, sizes = "num_tokens_per_expert_E", {"E": self.num_experts}
        check_tensor(name, num_tokens_per_expert_E, _COUNTS, sizes)
        load_E = num_tokens_per_expert_E.to(self.expert_bias_E)
        self.expert_bias_E.add_((load_E.mean() - load_E).sign(), alpha=self.options.bias_update_rate)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        token_index: Tensor | None = None,
        routing: Routing | RoutingStats | None = None,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        dispatch: DispatchOptions | None = None,
        shared_tokens: SharedTokens | None = None,
        losses: bool = True,
        **dispatch_choices: Any,
    ) -> tuple[Tensor, RoutingStats]:
        """Route every token through its experts.

        Args:
            x: (..., D), of the experts' dtype unless autocast is on.
            token_mask: (...) bool, True for real tokens. Other tokens use no expert, no capacity, and do not enter
                losses and counts. They may hold anything, NaN too, and their output is zero.
            token_ids: (...) integer vocabulary ids; the hash router needs them.
            token_index: (...) integer global indices of the tokens, which key the noise; None: counted from 0, or from
                where `count_tokens_from` says.
            routing: a choice to replay, before the capacity is applied. The weights of a Routing are used if it has
                them. Otherwise, and for the RoutingStats of an earlier call, weights are recomputed at the given ids.
            top_k: experts per token, for this call only.
            capacity_factor: rows per expert as a ratio of the even share, for this call only; inf: dropless.
            dispatch: options of this call's dispatch between processes, for a layer spread by `expertmesh.parallel`;
                None: the layer's.
            shared_tokens: processes that hold the other tokens of this call; token_index gives the order of all.
                Routing groups then span all these tokens. Expert-choice routing and the z-loss use this process's
                tokens only.
            losses: whether losses and counts are computed; decoding needs none. Must be equal on all processes.
            **dispatch_choices: single fields of `dispatch`, as in `layer(x, route_degree=2)`.

        Returns:
            y of x's shape and dtype, and the routing statistics. With grouped experts it does not synchronise with a
            GPU.

        Raises:
            ConfigError: an argument does not fit the layer.
        """
        call = make_layer_call(
            self,
            x,
            token_mask=token_mask,
            token_ids=token_ids,
            token_index=token_index,
            routing=routing,
            top_k=top_k,
            capacity_factor=capacity_factor,
            shared_tokens=shared_tokens,
            losses=losses,
        )
        with phase("route"):
            routing = route(self.router, call)
            kept = call.kept(routing)
        with phase("dispatch"):
            how = dispatch_options(dispatch, dispatch_choices)
            round_trip = self.dispatcher.start(Dispatched.of(call, kept), how)
        aux_loss, z_loss, counts_E, sums_RE = self._losses(call, routing)
        round_trip.advance()
        dense = dense_parts(self, call.x_TD)  # while tokens travel
        combined_TD = round_trip.finish(self.experts)
        with phase("combine"):
            y_TD = add_dense(combined_TD, dense, call.token_mask_T)
        assert routing.weights_TK is not None and kept.num_dropped is not None
        num_dropped = kept.num_dropped
        if call.drop_factor is not None and losses:
            num_dropped = self.dispatcher.sum_over_processes(num_dropped)
        stats = RoutingStats(
            aux_loss=aux_loss,
            z_loss=z_loss,
            num_tokens_per_expert_E=counts_E,
            num_dropped=num_dropped,
            topk_expert_ids_TK=routing.expert_ids_TK,
            topk_weights_TK=routing.weights_TK.detach(),
            kept_expert_ids_TK=kept.expert_ids_TK,
            balance_sums_RE=sums_RE,
        )
        # not a view: wrappers of the layer such as FSDP2 must be able to run x += y on the output
        return torch.ops.aten._unsafe_view(y_TD.to(x.dtype).contiguous(), x.shape), stats

    def _losses(self, call: LayerCall, routing: Routing) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Results of `weighted_losses`, or tensors without an element if the call wants no losses."""
        if not call.losses:
            nothing = call.x_TD.new_empty(0)
            return nothing, nothing, nothing, None
        if self.training and not torch.is_grad_enabled() and self.options.has_losses:
            warn_of_lost_losses()
        return weighted_losses(
            call,
            routing,
            sum_over_processes=self.dispatcher.sum_over_processes,
            earlier_RE=self.earlier_sums_RE if self.training else None,
        )


MoELayer.__init__.__signature__ = signature_with(  # type: ignore[attr-defined]
    MoELayer.__init__, KEYWORDS
)


def grouped_layers(model: nn.Module) -> Iterator[tuple[str, MoELayer, GroupedExperts]]:
    """Name, layer and experts of each layer of a model whose experts are stacked tensors, in any format."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and module.grouped is not None:
            yield name, module, module.grouped
