"""The oracle of oracles: the whole layer as an FP64 NumPy loop over tokens and choices, with gradients by hand.

Written from the semantics (docs/numerics.md), not from the layer's code, and slow on purpose.
"""

from dataclasses import replace

import numpy as np

from tests.oracle.oracle_losses import (
    balance_loss,
    balance_loss_backward,
    z_loss,
    z_loss_backward,
)
from tests.oracle.oracle_mlp import MLP, mlp_of
from tests.oracle.oracle_router import (
    Routed,
    capacity_of,
    load_backward,
    logits_backward,
    route,
    routing_groups,
    scores_backward,
    softmax,
    softmax_backward,
)
from tests.oracle.oracle_types import Array, OracleInputs, OracleOptions, OracleOutput


def oracle_forward(inputs: OracleInputs, options: OracleOptions) -> OracleOutput:
    """Run the layer on T tokens; T = 0 is fine."""
    mask_T = _mask(inputs)
    inputs = _hide_masked(inputs, mask_T)
    x_TD = inputs.x_TD
    routed = route(inputs, options)
    ids_TK = np.where(mask_T[:, None], routed.ids_TK, options.num_experts)
    routed.ids_TK, routed.raw_TK = (
        ids_TK,
        np.where(ids_TK < options.num_experts, routed.raw_TK, 0.0),
    )
    weights_TK = _weights(routed.raw_TK, ids_TK < options.num_experts, inputs, options)
    kept_TK = _assign(ids_TK, weights_TK, inputs, options, routed)
    final_TK = _weights(routed.raw_TK, kept_TK, inputs, options) * inputs.output_factor_TK
    moe_TD = np.zeros_like(x_TD)
    for t, x_D in enumerate(x_TD):
        for k, e in enumerate(ids_TK[t]):
            if kept_TK[t, k]:
                moe_TD[t] += final_TK[t, k] * _expert(inputs, options, int(e)).forward(x_D)
    y_TD = _beside_forward(inputs, options, moe_TD, mask_T)
    counts_E = np.array([(ids_TK == e).sum() for e in range(options.num_experts)], dtype=np.int64)
    return OracleOutput(
        y_TD=y_TD,
        aux_loss=options.aux_loss_weight * balance_loss(routed, mask_T, options),
        z_loss=options.z_loss_weight * z_loss(routed, mask_T, options),
        num_tokens_per_expert_E=counts_E,
        num_dropped=int((ids_TK < options.num_experts).sum() - kept_TK.sum()),
        topk_expert_ids_TK=ids_TK,
        topk_weights_TK=weights_TK,
        kept_TK=kept_TK,
        scores_TE=routed.scores_TE,
        logits_TE=routed.logits_TE,
        margin=min([abs(g) for g in routed.gaps], default=np.inf),
        tape={"routed": routed, "final_TK": final_TK, "moe_TD": moe_TD, "mask_T": mask_T},
    )


def oracle_backward(
    inputs: OracleInputs,
    options: OracleOptions,
    output: OracleOutput,
    dy_TD: Array,
) -> dict[str, Array]:
    """Gradients of sum(dy * y) + aux_loss + z_loss: of "x" and of every parameter by name."""
    tape = output.tape
    inputs = _hide_masked(inputs, tape["mask_T"])
    dy_TD = np.where(tape["mask_T"][:, None], dy_TD, 0.0)
    routed: Routed = tape["routed"]
    mask_T, final_TK = tape["mask_T"], tape["final_TK"]
    grads = {name: np.zeros_like(value) for name, value in inputs.params.items()}
    dmoe_TD, dx_TD = _beside_backward(inputs, options, tape["moe_TD"], dy_TD, mask_T, grads)
    dfinal_TK = np.zeros_like(final_TK)
    for t, x_D in enumerate(inputs.x_TD):
        for k, e in enumerate(output.topk_expert_ids_TK[t]):
            if output.kept_TK[t, k]:
                expert = _expert(inputs, options, int(e))
                into = mlp_of(grads, "experts.", options.activation, int(e))
                dfinal_TK[t, k] = float(expert.forward(x_D) @ dmoe_TD[t])
                dx_TD[t] += expert.backward(x_D, final_TK[t, k] * dmoe_TD[t], into)
    dfinal_TK *= inputs.output_factor_TK
    draw_TK = weights_backward(routed.raw_TK, dfinal_TK, output.kept_TK, inputs, options)
    dprobabilities_TE, dload_TE = balance_loss_backward(routed, mask_T, options, options.aux_loss_weight)
    dlogits_TE = scores_backward(routed, draw_TK, dprobabilities_TE, options)
    dlogits_TE += load_backward(inputs, routed, dload_TE, options)
    dlogits_TE += z_loss_backward(routed, mask_T, options, options.z_loss_weight)
    dx_TD += logits_backward(inputs, routed, dlogits_TE, options, grads)
    return {"x": np.where(mask_T[:, None], dx_TD, 0.0), **grads}


def _hide_masked(inputs: OracleInputs, mask_T: Array) -> OracleInputs:
    """What a masked token holds is never read."""
    return replace(inputs, x_TD=np.where(mask_T[:, None], inputs.x_TD, 0.0))


def _mask(inputs: OracleInputs) -> Array:
    num_tokens = len(inputs.x_TD)
    if inputs.token_mask_T is None:
        return np.ones(num_tokens, dtype=bool)
    return np.asarray(inputs.token_mask_T, dtype=bool).reshape(num_tokens)


def _expert(inputs: OracleInputs, options: OracleOptions, e: int) -> MLP:
    return mlp_of(dict(inputs.params), "experts.", options.activation, e)


def _divides(options: OracleOptions, slots: int) -> str:
    """Which sum the weights are divided by: none, topk or kept."""
    if options.normalize_weights != "auto":
        return options.normalize_weights
    return "topk" if slots > 1 and options.router != "expert_choice" else "none"


def _weights(raw_TK: Array, kept_TK: Array, inputs: OracleInputs, options: OracleOptions) -> Array:
    """Routing weights; those of rows that are not kept count in the sum of "topk" but not in that of "kept"."""
    if inputs.weights_TK is not None:
        return _given_weights(raw_TK, kept_TK, inputs, options)
    how = _divides(options, raw_TK.shape[1])
    weights_TK = np.zeros_like(raw_TK)
    for t, raw_K in enumerate(raw_TK):
        total = {"none": 1.0, "topk": raw_K.sum(), "kept": (raw_K * kept_TK[t]).sum()}[how]
        weights_TK[t] = raw_K / total if total > 0 else 0.0
    return weights_TK * options.weight_scale


def _given_weights(raw_TK: Array, kept_TK: Array, inputs: OracleInputs, options: OracleOptions) -> Array:
    """Replayed weights as they are; with "kept" the surviving ones get the sum that all live ones had."""
    given_TK = np.asarray(inputs.weights_TK, dtype=np.float64) * _mask(inputs)[:, None]
    if options.normalize_weights != "kept":
        return given_TK
    weights_TK = np.zeros_like(given_TK)
    for t, given_K in enumerate(given_TK):
        rest = (given_K * kept_TK[t]).sum()
        live_K = np.asarray(inputs.expert_ids_TK)[t] < options.num_experts
        if (kept_TK[t] == live_K).all():
            weights_TK[t] = given_K
        elif rest > 0:
            weights_TK[t] = given_K / rest * (given_K * live_K).sum()
    return weights_TK


def weights_backward(
    raw_TK: Array, dfinal_TK: Array, kept_TK: Array, inputs: OracleInputs, options: OracleOptions
) -> Array:
    """Gradient of the chosen scores from that of the weights; zero for replayed ones."""
    draw_TK = np.zeros_like(raw_TK)
    if inputs.weights_TK is not None:
        return draw_TK
    how = _divides(options, raw_TK.shape[1])
    for t, raw_K in enumerate(raw_TK):
        d_K = dfinal_TK[t] * kept_TK[t] * options.weight_scale
        counted_K = kept_TK[t] if how == "kept" else np.ones_like(kept_TK[t])
        total = (raw_K * counted_K).sum()
        if how == "none":
            draw_TK[t] = d_K
        elif total > 0:
            draw_TK[t] = d_K / total - counted_K * float(d_K @ raw_K) / total**2
    return draw_TK


def _assign(
    ids_TK: Array,
    weights_TK: Array,
    inputs: OracleInputs,
    options: OracleOptions,
    routed: Routed,
) -> Array:
    """(T, K) bool: rows that exist and are not dropped."""
    kept_TK = ids_TK < options.num_experts
    mask_T = _mask(inputs)
    for members in routing_groups(len(ids_TK), options.routing_group_size):
        limit = _limit(int(mask_T[members].sum()) if len(members) else 0, options)
        if limit is None:
            continue
        for e in range(options.num_experts):
            queue = [(k, t) for k in range(ids_TK.shape[1]) for t in members if ids_TK[t, k] == e]
            if options.drop_policy == "priority":
                # V-MoE, algorithm 2: by choice, then by the token's largest probability, of whichever expert
                key = [(k, -_priority(routed, ids_TK, weights_TK, t, options)) for k, t in queue]
            elif options.drop_policy == "weight":
                after = inputs.weights_TK is None and _divides(options, ids_TK.shape[1]) == "kept"
                ranked_TK = routed.raw_TK if after else weights_TK  # the division follows the drops
                key = [(0, -ranked_TK[t, k]) for k, t in queue]
            elif options.drop_policy == "random":
                assert inputs.keys_TK is not None or len(queue) <= limit, "random drops need keys"
                drawn = inputs.keys_TK
                key = [(0, 0.0 if drawn is None else drawn[t, k]) for k, t in queue]
            else:
                key = [(0, 0.0) for _ in queue]
            order = sorted(range(len(queue)), key=lambda i: (key[i], queue[i]))
            for i in order[limit:]:
                kept_TK[queue[i][1], queue[i][0]] = False
            if limit < len(queue) and options.drop_policy != "first":
                last, first_out = (
                    key[order[limit - 1]] if limit else (-1, -np.inf),
                    key[order[limit]],
                )
                by_weight = options.drop_policy in ("priority", "weight")
                # Constants are equal in every precision, and queue as with "first".
                is_constant = options.router == "hash" or -last[1] == options.weight_scale
                is_tie = by_weight and is_constant and last == first_out
                if last[0] == first_out[0] and not is_tie:
                    routed.gaps.append(first_out[1] - last[1])
    return kept_TK


def _priority(routed: Routed, ids_TK: Array, weights_TK: Array, t: int, options: OracleOptions) -> float:
    """A token's largest probability; the largest of its routing weights where the router has no probabilities."""
    if options.router != "hash":
        return float(routed.probabilities_TE[t].max())
    return float(weights_TK[t, ids_TK[t] < options.num_experts].max())


def _limit(num_valid: int, options: OracleOptions) -> int | None:
    """Most rows per expert in a group with `num_valid` tokens; None: no limit."""
    if options.router == "expert_choice":
        return None
    limits = []
    if options.capacity_factor is not None:
        limits.append(capacity_of(num_valid, options))
    if options.max_capacity_factor is not None:
        bound = OracleOptions(
            num_experts=options.num_experts,
            top_k=options.top_k,
            min_capacity=options.min_capacity,
            capacity_factor=options.max_capacity_factor,
        )
        limits.append(capacity_of(num_valid, bound))
    return min(limits) if limits else None


def _beside_forward(inputs: OracleInputs, options: OracleOptions, moe_TD: Array, mask_T: Array) -> Array:
    """Residual mixture and shared experts: y = a moe + b mlp + shared, (a, b) = softmax(W x + b)."""
    params = dict(inputs.params)
    y_TD = moe_TD.copy()
    for t, x_D in enumerate(inputs.x_TD):
        if not mask_T[t]:
            continue
        if "residual_mlp.w_in" in params:
            a, b = _coefficients(params, x_D)
            mlp = mlp_of(params, "residual_mlp.", options.activation)
            y_TD[t] = a * moe_TD[t] + b * mlp.forward(x_D)
        if "shared_experts.w_in" in params:
            shared = mlp_of(params, "shared_experts.", options.activation)
            y_TD[t] += _shared_part(params, x_D) * shared.forward(x_D)
    return y_TD


def _shared_part(params: dict[str, Array], x_D: Array) -> float:
    """Share of the shared experts: sigmoid(g . x), or 1 without a gate."""
    if "shared_gate.weight" not in params:
        return 1.0
    return float(1.0 / (1.0 + np.exp(-params["shared_gate.weight"][0] @ x_D)))


def _coefficients(params: dict[str, Array], x_D: Array) -> Array:
    weight, bias = params["residual_coefficient.weight"], params["residual_coefficient.bias"]
    return softmax(weight @ x_D + bias)


def _beside_backward(
    inputs: OracleInputs,
    options: OracleOptions,
    moe_TD: Array,
    dy_TD: Array,
    mask_T: Array,
    grads: dict[str, Array],
) -> tuple[Array, Array]:
    """Gradients of the routed part's output and, so far, of x."""
    params = dict(inputs.params)
    dmoe_TD, dx_TD = np.array(dy_TD, dtype=np.float64), np.zeros_like(inputs.x_TD)
    for t, x_D in enumerate(inputs.x_TD):
        if "residual_mlp.w_in" in params:
            mlp = mlp_of(params, "residual_mlp.", options.activation)
            into = mlp_of(grads, "residual_mlp.", options.activation)
            ab = _coefficients(params, x_D)
            dab = np.array([dy_TD[t] @ moe_TD[t], dy_TD[t] @ mlp.forward(x_D)])
            dlogits = softmax_backward(ab, dab)
            grads["residual_coefficient.weight"] += np.outer(dlogits, x_D)
            grads["residual_coefficient.bias"] += dlogits
            dx_TD[t] += params["residual_coefficient.weight"].T @ dlogits
            dmoe_TD[t] = ab[0] * dy_TD[t]
            dx_TD[t] += mlp.backward(x_D, ab[1] * dy_TD[t], into)
        if "shared_experts.w_in" in params:
            into = mlp_of(grads, "shared_experts.", options.activation)
            shared = mlp_of(params, "shared_experts.", options.activation)
            part = _shared_part(params, x_D)
            dx_TD[t] += shared.backward(x_D, part * dy_TD[t], into)
            if "shared_gate.weight" in params:
                slope = part * (1.0 - part) * (dy_TD[t] @ shared.forward(x_D))
                grads["shared_gate.weight"][0] += slope * x_D
                dx_TD[t] += slope * params["shared_gate.weight"][0]
    return dmoe_TD, dx_TD
