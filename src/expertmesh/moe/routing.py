"""Route stage: noise and jitter on the router's input and logits, the choice of experts (or its replay), and the
mask."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.moe.capacity import choice_factor
from expertmesh.moe.layer_call import LayerCall
from expertmesh.moe.routing_noise import (
    STREAM_INPUT_DROPOUT,
    STREAM_INPUT_JITTER,
    STREAM_ROUTER_NOISE,
    gaussian,
    gumbel,
    uniform,
)
from expertmesh.moe.selection import (
    balance_scores,
    choose_by_expert,
    choose_by_hash,
    choose_by_token,
    normalized,
    scores_of,
    weights_at,
)
from expertmesh.moe.types import RouterOutput, Routing
from expertmesh.ops.check import check_range
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.route_metadata import NO_EXPERT

_MODULE_ARGUMENTS = ("token_mask_T", "token_ids_T", "token_index_T", "top_k")


def route(router: nn.Module, call: LayerCall) -> Routing:
    """Choose experts and routing weights for all tokens; masked tokens get ids E and weights 0.

    Arithmetic is FP32 (FP64 for FP64 input) with autocast off, except in a custom router.
    """
    options = call.options
    given = None if options.router_kind == "hash" else _run_router(router, call)
    with without_autocast(call.x_TD.device):
        if isinstance(given, Routing):
            routing = given
        elif given is None:
            routing = _hash(router, call)
        else:
            heat = options.logit_temperature
            routing = _choose(given if heat == 1.0 else given / heat, call)
        if call.routing is not None:
            routing = _replay(routing, call.routing, call)
        return _mask_routing(routing, call.token_mask_T, options.num_experts)


def _run_router(router: nn.Module, call: LayerCall) -> Tensor | Routing:
    x_TD = _add_router_input_noise(call)
    if call.options.router_kind != "module":
        result: Tensor | Routing = router(x_TD)
        return result
    T, E = call.x_TD.shape[0], call.options.num_experts
    # torch.compile wraps a module; the signature is that of the module inside
    names = inspect.signature(getattr(router, "_orig_mod", router).forward).parameters
    kwargs = {name: getattr(call, name) for name in _MODULE_ARGUMENTS if name in names}
    given = router(x_TD.to(call.x_TD.dtype), **kwargs)
    if isinstance(given, RouterOutput):
        _check_output(given, T, E)
        return Routing(*vars(given).values())
    if not isinstance(given, Tensor) or tuple(given.shape) != (T, E):
        found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ConfigError(
            f"the router returned {found}; it must return logits of shape ({T}, {E}) or a RouterOutput; fix its forward"
        )
    return given.to(accumulate_dtype(given.dtype))


def _check_output(output: RouterOutput, num_tokens: int, num_experts: int) -> None:
    ids, weights, scores = output.topk_expert_ids_TK, output.topk_weights_TK, output.scores_TE
    if ids.dim() != 2 or ids.shape[0] != num_tokens or ids.dtype != torch.int64 or ids.shape != weights.shape:
        raise ConfigError(
            f"the router returned ids {tuple(ids.shape)} of {ids.dtype} and weights {tuple(weights.shape)}; both must "
            f"be ({num_tokens}, K), the ids int64; fix its forward"
        )
    what, fix = "what the router returned", "fix its forward"
    check_range(what, ids, most=num_experts, fix=fix, note=NO_EXPERT)
    if scores is not None and tuple(scores.shape) != (num_tokens, num_experts):
        raise ConfigError(
            f"the router returned scores of shape {tuple(scores.shape)}; it must be ({num_tokens}, {num_experts}); "
            "fix its forward"
        )


def _add_router_input_noise(call: LayerCall) -> Tensor:
    """Input of the router: x itself, or in training x with jitter and dropout, in full precision."""
    x_TD, options = call.x_TD, call.options
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


def _noise(call: LayerCall, dtype: torch.dtype) -> Tensor | None:
    """(T, E) noise on the logits in training, or None."""
    kind, std, E = call.options.noise_kind, call.options.router_noise_std, call.options.num_experts
    if not call.training or kind == "none":
        return None
    if kind.startswith("gumbel"):
        return std * gumbel(call.bits(E, STREAM_ROUTER_NOISE), dtype)
    bits = call.bits(2 * E, STREAM_ROUTER_NOISE)
    return std * gaussian(bits[:, :E], bits[:, E:], dtype)


def _choose(logits_TE: Tensor, call: LayerCall) -> Routing:
    options = call.options
    how: dict[str, Any] = {"options": options, "arithmetic": call.arithmetic}
    if call.routing is not None:
        # The replayed ids replace the choice: only scores and logits are needed.
        scores_TE = balance_scores(scores_of(logits_TE, **how), **how)
        ids_TK = call.routing.expert_ids_TK
        return Routing(ids_TK, logits_TE.new_zeros(ids_TK.shape), scores_TE, logits_TE)
    noise_TE = _noise(call, logits_TE.dtype)
    if noise_TE is not None and options.noise_kind == "gumbel_after_first":
        # the best logit gets the largest noise, so it stays the best
        best_T1 = logits_TE.detach().argmax(-1, keepdim=True)
        noise_TE = noise_TE.scatter(-1, best_T1, noise_TE.amax(-1, keepdim=True))
    if options.router_kind == "expert_choice":
        return choose_by_expert(
            logits_TE,
            call.top_k,
            factor=choice_factor(options, call.given_factor, training=call.training),
            token_mask_T=call.token_mask_T,
            noise_TE=noise_TE,
            **how,
        )
    # With a bias or a group limit the probability of being chosen has no closed form.
    plain = call.expert_bias_E is None and options.num_expert_groups == 1
    counts_load = options.balance_loss == "importance_load" and call.losses
    return choose_by_token(
        logits_TE,
        call.top_k,
        noise_TE=noise_TE,
        bias_E=call.expert_bias_E,
        with_load=counts_load and options.noise_kind == "gaussian" and plain,
        **how,
    )


def _hash(router: nn.Module, call: LayerCall) -> Routing:
    if call.token_ids_T is None:
        raise ConfigError(
            "token_ids=None with router='hash': the hash router routes by token id; pass token_ids=, of x.shape[:-1]"
        )
    assert isinstance(router.hash_key, Tensor)
    return choose_by_hash(
        call.token_ids_T,
        router.hash_key,
        call.top_k,
        options=call.options,
        dtype=accumulate_dtype(call.x_TD.dtype),
    )


def _replay(routed: Routing, given: Routing, call: LayerCall) -> Routing:
    """Replace the router's ids by given ones, with given or recomputed weights."""
    options, arithmetic = call.options, call.arithmetic
    ids_TK = given.expert_ids_TK.to(torch.int64)
    own_TK = routed.weights_TK
    assert own_TK is not None
    normalize = options.normalizes(call.top_k)
    if given.weights_TK is not None:
        weights_TK = given.weights_TK.to(own_TK.dtype)
    elif routed.logits_TE is not None:
        scores_TE = scores_of(routed.logits_TE, options, arithmetic)
        weights_TK = weights_at(
            routed.logits_TE,
            scores_TE,
            ids_TK,
            normalize=normalize,
            options=options,
            arithmetic=arithmetic,
        )
    else:
        if routed.scores_TE is not None:
            weights_TK = torch.nn.functional.pad(routed.scores_TE, (0, 1)).gather(-1, ids_TK)
        else:
            weights_TK = (ids_TK < options.num_experts).to(own_TK.dtype)
        weights_TK = normalized(weights_TK, arithmetic) if normalize else weights_TK
        weights_TK = weights_TK * options.weight_scale
    return replace(routed, expert_ids_TK=ids_TK, weights_TK=weights_TK, load_TE=None)


def _mask_routing(routing: Routing, token_mask_T: Tensor | None, num_experts: int) -> Routing:
    if token_mask_T is None:
        return routing
    hidden, weights_TK = ~token_mask_T[:, None], routing.weights_TK
    return replace(
        routing,
        expert_ids_TK=routing.expert_ids_TK.masked_fill(hidden, num_experts),
        weights_TK=None if weights_TK is None else weights_TK.masked_fill(hidden, 0),
    )
