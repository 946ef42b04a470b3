"""The route stage: noise and jitter on the way into a router, the choice (or its replay), and the mask."""

import inspect
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expertmesh.config.moe_rules import LayerOptions
from expertmesh.errors import ConfigError
from expertmesh.moe.call import CallInputs
from expertmesh.moe.random import (
    STREAM_INPUT_DROPOUT,
    STREAM_INPUT_JITTER,
    STREAM_ROUTER_NOISE,
    gaussian,
    gumbel,
    uniform,
)
from expertmesh.moe.selection import (
    SelectionOptions,
    balance_scores,
    choose_by_expert,
    choose_by_hash,
    choose_by_token,
    normalized,
    scores_of,
    weights_at,
)
from expertmesh.moe.types import RouterOutput, Routing
from expertmesh.moe.validation import check_ids
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast

_MODULE_ARGUMENTS = ("token_mask_T", "token_ids_T", "token_index_T", "top_k")


@dataclass(frozen=True)
class RoutingOptions:
    """The options of `MoELayer` up to the choice; `kind` is a name in ROUTERS, or "module"."""

    kind: str
    noise: str
    input_jitter: float
    input_dropout: float
    logit_temperature: float
    with_load: bool
    selection: SelectionOptions

    @staticmethod
    def of(options: LayerOptions) -> "RoutingOptions":
        """Those among a layer's options."""
        return RoutingOptions(
            kind="module" if options.own_router else options.router,
            noise=options.router_noise if options.router_noise_std > 0 else "none",
            input_jitter=options.input_jitter,
            input_dropout=options.input_dropout,
            logit_temperature=options.logit_temperature,
            with_load=options.balance_loss == "importance_load",
            selection=SelectionOptions.of(options),
        )

    @property
    def needs_noise(self) -> bool:
        """Whether training draws random numbers before the choice."""
        return self.noise != "none" or self.input_jitter > 0 or self.input_dropout > 0


def route(router: nn.Module, call: CallInputs, options: RoutingOptions) -> RouterOutput:
    """Choices and weights of all tokens, with ids E and weights 0 at masked ones.

    All arithmetic but that of a custom router is FP32 (FP64 for FP64 input), with autocast off.

    Raises:
        ConfigError: the hash router has no token ids, or a custom router's result does not fit.
    """
    arithmetic = options.selection.arithmetic.in_mode(call.training)
    if arithmetic is not options.selection.arithmetic:  # Dynamo of torch 2.11 cannot make these
        options = replace(options, selection=replace(options.selection, arithmetic=arithmetic))
    given = None if options.kind == "hash" else _run_router(router, call, options)
    with without_autocast(call.x_TD.device):
        if isinstance(given, RouterOutput):
            output = given
        elif given is None:
            output = _hash(router, call, options)
        else:
            heat = options.logit_temperature
            output = _choose(given if heat == 1.0 else given / heat, call, options)
        if call.routing is not None:
            output = _replay(output, call.routing, options.selection, call.top_k)
        return _hide(output, call.token_mask_T, options.selection.num_experts)


def _run_router(
    router: nn.Module, call: CallInputs, options: RoutingOptions
) -> Tensor | RouterOutput:
    x_TD = _perturb(call, options)
    if options.kind != "module":
        return router(x_TD)
    T, E = call.x_TD.shape[0], options.selection.num_experts
    # of what torch.compile has wrapped, its own
    names = inspect.signature(getattr(router, "_orig_mod", router).forward).parameters
    kwargs = {name: getattr(call, name) for name in _MODULE_ARGUMENTS if name in names}
    given = router(x_TD.to(call.x_TD.dtype), **kwargs)
    if isinstance(given, RouterOutput):
        _check_output(given, T, E)
        return given
    if not isinstance(given, Tensor) or tuple(given.shape) != (T, E):
        found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ConfigError(
            f"the router returned {found}; it must return logits of shape ({T}, {E}) or a RouterOutput; fix its forward"
        )
    return given.to(accumulate_dtype(given.dtype))


def _check_output(output: RouterOutput, num_tokens: int, num_experts: int) -> None:
    ids, weights, scores = output.topk_expert_ids_TK, output.topk_weights_TK, output.scores_TE
    if (
        ids.dim() != 2
        or ids.shape[0] != num_tokens
        or ids.dtype != torch.int64
        or ids.shape != weights.shape
    ):
        raise ConfigError(
            f"the router returned ids {tuple(ids.shape)} of {ids.dtype} and weights {tuple(weights.shape)}; both must "
            f"be ({num_tokens}, K), the ids int64; fix its forward"
        )
    check_ids(ids, num_experts, what="what the router returned", fix="fix its forward")
    if scores is not None and tuple(scores.shape) != (num_tokens, num_experts):
        raise ConfigError(
            f"the router returned scores of shape {tuple(scores.shape)}; it must be ({num_tokens}, {num_experts}); "
            "fix its forward"
        )


def _perturb(call: CallInputs, options: RoutingOptions) -> Tensor:
    """The router's input: x itself, or in training x times jitter and dropout, in full precision."""
    x_TD = call.x_TD
    if not call.training:
        return x_TD
    exact = accumulate_dtype(x_TD.dtype)
    D = x_TD.shape[1]
    if options.input_jitter:
        u_TD = uniform(call.bits(D, STREAM_INPUT_JITTER), exact)
        x_TD = x_TD.to(exact) * (1.0 + options.input_jitter * (2.0 * u_TD - 1.0))
    if options.input_dropout:
        keep_TD = uniform(call.bits(D, STREAM_INPUT_DROPOUT), exact) >= options.input_dropout
        x_TD = x_TD.to(exact) * keep_TD / (1.0 - options.input_dropout)
    return x_TD


def _noise(call: CallInputs, options: RoutingOptions, dtype: torch.dtype) -> Tensor | None:
    """(T, E) noise on the logits, in training; None: none."""
    if not call.training or options.noise == "none":
        return None
    E = options.selection.num_experts
    if options.noise.startswith("gumbel"):
        return options.selection.noise_std * gumbel(call.bits(E, STREAM_ROUTER_NOISE), dtype)
    bits = call.bits(2 * E, STREAM_ROUTER_NOISE)
    return options.selection.noise_std * gaussian(bits[:, :E], bits[:, E:], dtype)


def _choose(logits_TE: Tensor, call: CallInputs, options: RoutingOptions) -> RouterOutput:
    selection = options.selection
    if call.routing is not None:
        # The replayed ids stand in for the choice: only scores and logits are needed.
        scores_TE = balance_scores(scores_of(logits_TE, selection), selection)
        ids_TK = call.routing.expert_ids_TK
        return RouterOutput(ids_TK, logits_TE.new_zeros(ids_TK.shape), scores_TE, logits_TE)
    noise_TE = _noise(call, options, logits_TE.dtype)
    if noise_TE is not None and options.noise == "gumbel_after_first":
        # the best logit with the largest noise stays the best
        best_T1 = logits_TE.detach().argmax(-1, keepdim=True)
        noise_TE = noise_TE.scatter(-1, best_T1, noise_TE.amax(-1, keepdim=True))
    if options.kind == "expert_choice":
        return choose_by_expert(
            logits_TE,
            call.top_k,
            options=selection,
            factor=call.choice_factor,
            group_size=call.group_size,
            token_mask_T=call.token_mask_T,
            noise_TE=noise_TE,
        )
    # With a bias or a group limit the chance of being chosen has no closed form.
    plain = call.expert_bias_E is None and selection.num_expert_groups == 1
    return choose_by_token(
        logits_TE,
        call.top_k,
        options=selection,
        noise_TE=noise_TE,
        bias_E=call.expert_bias_E,
        with_load=options.with_load and options.noise == "gaussian" and plain,
    )


def _hash(router: nn.Module, call: CallInputs, options: RoutingOptions) -> RouterOutput:
    if call.token_ids_T is None:
        raise ConfigError(
            "token_ids=None with router='hash': the hash router routes by token id; pass token_ids=, of x.shape[:-1]"
        )
    assert isinstance(router.hash_key, Tensor)
    return choose_by_hash(
        call.token_ids_T,
        router.hash_key,
        call.top_k,
        options=options.selection,
        dtype=accumulate_dtype(call.x_TD.dtype),
    )


def _replay(
    output: RouterOutput, routing: Routing, selection: SelectionOptions, top_k: int
) -> RouterOutput:
    """Put given ids in the place of the router's, with given or recomputed weights."""
    ids_TK = routing.expert_ids_TK.to(torch.int64)
    normalize = selection.normalizes(top_k)
    if routing.weights_TK is not None:
        weights_TK = routing.weights_TK.to(output.topk_weights_TK.dtype)
    elif output.logits_TE is not None:
        scores_TE = scores_of(output.logits_TE, selection)
        weights_TK = weights_at(
            output.logits_TE, scores_TE, ids_TK, normalize=normalize, options=selection
        )
    elif output.scores_TE is not None:
        padded = torch.nn.functional.pad(output.scores_TE, (0, 1))
        weights_TK = padded.gather(-1, ids_TK)
        weights_TK = (
            normalized(weights_TK, selection) if normalize else weights_TK
        ) * selection.weight_scale
    else:
        live_TK = (ids_TK < selection.num_experts).to(output.topk_weights_TK.dtype)
        weights_TK = (
            normalized(live_TK, selection) if normalize else live_TK
        ) * selection.weight_scale
    return replace(output, topk_expert_ids_TK=ids_TK, topk_weights_TK=weights_TK, load_TE=None)


def _hide(output: RouterOutput, token_mask_T: Tensor | None, num_experts: int) -> RouterOutput:
    if token_mask_T is None:
        return output
    hidden = ~token_mask_T[:, None]
    return replace(
        output,
        topk_expert_ids_TK=output.topk_expert_ids_TK.masked_fill(hidden, num_experts),
        topk_weights_TK=output.topk_weights_TK.masked_fill(hidden, 0),
    )
