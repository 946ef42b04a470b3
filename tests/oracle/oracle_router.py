"""FP64 NumPy: routers, one token at a time, forwards and backwards by hand."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from tests.oracle.oracle_mlp import sigmoid
from tests.oracle.oracle_types import Array, OracleInputs, OracleOptions


def softmax(z: Array) -> Array:
    """exp(z) / sum exp(z) of a vector."""
    e = np.exp(z - z.max())
    return e / e.sum()


def softmax_backward(s: Array, ds: Array) -> Array:
    """Gradient of the logits from the softmax and its gradient."""
    return s * (ds - float(ds @ s))


def best(values: Array, count: int) -> list[int]:
    """Indices of the `count` largest values, largest first, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


@dataclass
class Routed:
    """A router's answer and what its backward needs.

    `raw_TK` are the scores at the chosen experts, before normalisation and `weight_scale`.
    """

    router_input_TD: Array
    logits_TE: Array
    scores_TE: Array
    probabilities_TE: Array
    ids_TK: Array
    raw_TK: Array
    load_TE: Array | None = None
    gaps: list[float] = field(default_factory=list)


def compute_logits(inputs: OracleInputs, options: OracleOptions) -> tuple[Array, Array]:
    """Router input (T, D) and clean logits (T, E), after the temperature."""
    x_TD = inputs.x_TD if inputs.input_factor_TD is None else inputs.x_TD * inputs.input_factor_TD
    logits_TE = np.zeros((len(x_TD), options.num_experts))
    for t, x_D in enumerate(x_TD):
        if options.router == "cosine":
            logits_TE[t] = _cosine(inputs, x_D)
        elif options.router != "hash":
            logits_TE[t] = inputs.params["router.proj.weight"] @ x_D
    return x_TD, logits_TE / options.logit_temperature


def _unit(v: Array) -> Array:
    return v / max(float(np.sqrt(v @ v)), COSINE_EPS)


COSINE_EPS = 1e-6
MAX_LOG_SCALE = math.log(100.0)


def _cosine(inputs: OracleInputs, x_D: Array) -> Array:
    """Cosine between W x and each expert's embedding, times exp(min(log_scale, log 100))."""
    p = inputs.params
    z = _unit(p["router.proj.weight"] @ x_D)
    scale = math.exp(min(float(p["router.log_scale"].item()), MAX_LOG_SCALE))
    return np.array([scale * float(z @ _unit(m)) for m in p["router.expert_embeddings"]])


def score(logits_E: Array, score_function: str) -> Array:
    """Scores over all experts: sigmoid, or softmax (of which softmax_after_topk uses only the order)."""
    return sigmoid(logits_E) if score_function == "sigmoid" else softmax(logits_E)


def probabilities(scores_E: Array, score_function: str) -> Array:
    """Scores that sum to one, for the balance loss."""
    return scores_E / scores_E.sum() if score_function == "sigmoid" else scores_E


def route(inputs: OracleInputs, options: OracleOptions) -> Routed:
    """Choose experts and read their scores."""
    x_TD, logits_TE = compute_logits(inputs, options)
    fn = options.score_function
    scores_TE = np.array([score(row, fn) for row in logits_TE]).reshape(logits_TE.shape)
    probabilities_TE = np.array([probabilities(row, fn) for row in scores_TE]).reshape(scores_TE.shape)
    gaps: list[float] = []
    if inputs.expert_ids_TK is not None:
        ids_TK = np.asarray(inputs.expert_ids_TK, dtype=np.int64)
    elif options.router == "expert_choice":
        ids_TK = _experts_choose(logits_TE, inputs, options, gaps)
    else:
        ids_TK = np.zeros((len(x_TD), options.top_k), dtype=np.int64)
        for t in range(len(x_TD)):
            is_real = inputs.token_mask_T is None or inputs.token_mask_T[t]
            noise = np.zeros_like(logits_TE[t]) if inputs.noise_TE is None else inputs.noise_TE[t]
            if options.router_noise == "gumbel_after_first" and inputs.noise_TE is not None:
                first, *rest = np.argsort(-logits_TE[t], kind="stable")
                if is_real and rest:
                    gaps.append(float(logits_TE[t, first] - logits_TE[t, rest[0]]))
                noise = noise.copy()
                noise[first] = noise.max()
            noisy = logits_TE[t] + noise
            ids_TK[t] = _choose(noisy, inputs.expert_bias_E, options, gaps if is_real else [])
    raw_TK = np.zeros(ids_TK.shape)
    for t, ids_K in enumerate(ids_TK):
        raw_TK[t] = _scores_at(logits_TE[t], scores_TE[t], ids_K, options)
    routed = Routed(x_TD, logits_TE, scores_TE, probabilities_TE, ids_TK, raw_TK, gaps=gaps)
    if has_load(inputs, options) and inputs.noise_TE is not None:
        routed.load_TE = np.array(
            [
                probability_of_choice(row, row + noise, options)[0]
                for row, noise in zip(logits_TE, inputs.noise_TE, strict=True)
            ]
        ).reshape(logits_TE.shape)
    return routed


def has_load(inputs: OracleInputs, options: OracleOptions) -> bool:
    """Whether the load of the importance+load loss is a probability under Gaussian noise (else a count)."""
    return (
        options.balance_loss == "importance_load"
        and options.router_noise == "gaussian"
        and options.router != "expert_choice"
        and inputs.noise_TE is not None
        and inputs.expert_ids_TK is None
        and inputs.expert_bias_E is None
        and options.num_expert_groups == 1
    )


def probability_of_choice(logits_E: Array, noisy_E: Array, options: OracleOptions) -> tuple[Array, Array, list[int]]:
    """P(e is chosen if only its noise is drawn anew) (Shazeer et al. 2017, eq. 8-9), its slope, the rivals.

    Phi((logit_e - K-th best noisy logit of the others) / std); the rival of e is that other expert.
    """
    num_experts, std = len(logits_E), options.router_noise_std
    probability_E, slope_E, rivals = (
        np.ones(num_experts),
        np.zeros(num_experts),
        list(range(num_experts)),
    )
    if options.top_k == num_experts:
        return probability_E, slope_E, rivals
    for e in range(num_experts):
        others = [i for i in best(noisy_E, num_experts) if i != e]
        rivals[e] = others[options.top_k - 1]
        z = float(logits_E[e] - noisy_E[rivals[e]]) / std
        probability_E[e] = 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
        slope_E[e] = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi) / std
    return probability_E, slope_E, rivals


def load_backward(inputs: OracleInputs, routed: Routed, dload_TE: Array, options: OracleOptions) -> Array:
    """Gradient of the clean logits from that of the load."""
    dlogits_TE = np.zeros_like(routed.logits_TE)
    if routed.load_TE is None or inputs.noise_TE is None:
        return dlogits_TE
    for t, logits_E in enumerate(routed.logits_TE):
        _, slope_E, rivals = probability_of_choice(logits_E, logits_E + inputs.noise_TE[t], options)
        for e, rival in enumerate(rivals):
            dlogits_TE[t, e] += dload_TE[t, e] * slope_E[e]
            dlogits_TE[t, rival] -= dload_TE[t, e] * slope_E[e]
    return dlogits_TE


def _choose(noisy_E: Array, bias_E: Array | None, options: OracleOptions, gaps: list[float]) -> list[int]:
    """The K experts of one token, best first."""
    is_late = options.score_function == "softmax_after_topk"
    criterion = noisy_E if is_late else score(noisy_E, options.score_function)
    if bias_E is not None:
        criterion = criterion + bias_E
    allowed = np.ones(options.num_experts, dtype=bool)
    if options.num_expert_groups > 1:
        size = options.num_experts // options.num_expert_groups
        strength = np.array(
            [
                np.sort(criterion[g * size : (g + 1) * size])[::-1][: GROUP_SCORE_TOP[options.group_score]].sum()
                for g in range(options.num_expert_groups)
            ]
        )
        groups = best(strength, options.num_limited_groups)
        gaps.extend(_gap(strength, groups))
        allowed = np.array([e // size in groups for e in range(options.num_experts)])
    criterion = np.where(allowed, criterion, -np.inf)
    chosen = best(criterion, options.top_k)
    gaps.extend(_gap(criterion[allowed], [int(allowed[:e].sum()) for e in chosen]))
    return chosen


GROUP_SCORE_TOP = {"top2_sum": 2, "max": 1}
"""A group of experts is as strong as the sum of its two best scores (DeepSeek-V3)."""


def _gap(values: Array, chosen: list[int]) -> list[float]:
    """Differences that decide a ranked choice: between neighbours in rank, and to the best one left out."""
    rest = [float(values[i]) for i in range(len(values)) if i not in chosen]
    ranked = [float(values[i]) for i in chosen] + ([max(rest)] if rest else [])
    return [a - b for a, b in zip(ranked, ranked[1:], strict=False)]


def _experts_choose(logits_TE: Array, inputs: OracleInputs, options: OracleOptions, gaps: list[float]) -> Array:
    """Expert choice: every expert takes its best tokens of each group; slot e of a token is e or "none" (E)."""
    num_tokens, num_experts = logits_TE.shape
    noisy_TE = logits_TE if inputs.noise_TE is None else logits_TE + inputs.noise_TE
    scores_TE = np.array([score(row, options.score_function) for row in noisy_TE]).reshape(noisy_TE.shape)
    factors = (options.capacity_factor or 1.0, options.max_capacity_factor or np.inf)
    options = replace(options, min_capacity=1, capacity_factor=min(factors))
    ids_TE = np.full((num_tokens, num_experts), num_experts, dtype=np.int64)
    for members in routing_groups(num_tokens, options.routing_group_size):
        valid = [t for t in members if inputs.token_mask_T is None or inputs.token_mask_T[t]]
        count = min(capacity_of(len(valid), options), len(valid))
        for e in range(num_experts):
            column = scores_TE[valid, e]
            taken = best(column, count)
            gaps.extend(_gap(column, taken)[-1:] if count < len(valid) else [])
            for i in taken:
                ids_TE[valid[i], e] = e
    return ids_TE


def routing_groups(num_tokens: int, size: int | None) -> list[range]:
    """Consecutive groups of `size` tokens; the last may be shorter; None: one group."""
    step = max(num_tokens, 1) if size is None else size
    return [range(a, min(a + step, num_tokens)) for a in range(0, num_tokens, step)]


def capacity_of(num_valid: int, options: OracleOptions) -> int:
    """Rows one expert may take from a group with `num_valid` tokens: max(min_capacity, ceil(K T / E * factor))."""
    factor = options.capacity_factor
    assert factor is not None
    # As the user wrote it: 1.1 is 11/10, so that 10 rows times 1.1 are 11, not 12.
    share = Fraction(options.top_k * num_valid, options.num_experts) * Fraction(repr(float(factor)))
    return max(options.min_capacity, math.ceil(share))


def _scores_at(logits_E: Array, scores_E: Array, ids_K: Array, options: OracleOptions) -> Array:
    """Scores of the chosen experts; 0 for "none"."""
    raw_K = np.zeros(len(ids_K))
    if options.router == "hash":
        return (ids_K < options.num_experts).astype(np.float64)
    live = [k for k, e in enumerate(ids_K) if e < options.num_experts]
    if not live:
        return raw_K
    if options.score_function == "softmax_after_topk":
        raw_K[live] = softmax(logits_E[ids_K[live]])
    else:
        raw_K[live] = scores_E[ids_K[live]]
    return raw_K


def scores_backward(routed: Routed, draw_TK: Array, dprobabilities_TE: Array, options: OracleOptions) -> Array:
    """Gradient of the clean logits from those of the chosen scores and of the probabilities."""
    dlogits_TE = np.zeros_like(routed.logits_TE)
    if options.router == "hash":
        return dlogits_TE
    for t, ids_K in enumerate(routed.ids_TK):
        scores_E = routed.scores_TE[t]
        dscores_E = np.zeros_like(scores_E)
        if options.score_function == "sigmoid":
            total = scores_E.sum()
            p_E, dp_E = routed.probabilities_TE[t], dprobabilities_TE[t]
            dscores_E += (dp_E - float(dp_E @ p_E)) / total
        else:
            dscores_E += dprobabilities_TE[t]
        live = [k for k, e in enumerate(ids_K) if e < options.num_experts]
        if options.score_function == "softmax_after_topk" and live:
            dchosen = softmax_backward(routed.raw_TK[t, live], draw_TK[t, live])
            for k, d in zip(live, dchosen, strict=True):
                dlogits_TE[t, ids_K[k]] += d
        else:
            for k in live:
                dscores_E[ids_K[k]] += draw_TK[t, k]
        if options.score_function == "sigmoid":
            dlogits_TE[t] += dscores_E * scores_E * (1.0 - scores_E)
        else:
            dlogits_TE[t] += softmax_backward(scores_E, dscores_E)
    return dlogits_TE


def logits_backward(
    inputs: OracleInputs,
    routed: Routed,
    dlogits_TE: Array,
    options: OracleOptions,
    grads: dict[str, Array],
) -> Array:
    """Add the gradients of the router's parameters to `grads`; return the gradient of x."""
    dx_TD = np.zeros_like(inputs.x_TD)
    if options.router == "hash":
        return dx_TD
    for t, x_D in enumerate(routed.router_input_TD):
        d_E = dlogits_TE[t] / options.logit_temperature
        if options.router == "cosine":
            dx_TD[t] = _cosine_backward(inputs, x_D, d_E, grads)
        else:
            grads["router.proj.weight"] += np.outer(d_E, x_D)
            dx_TD[t] = inputs.params["router.proj.weight"].T @ d_E
    return dx_TD if inputs.input_factor_TD is None else dx_TD * inputs.input_factor_TD


def _unit_backward(v: Array, dunit: Array) -> Array:
    norm = float(np.sqrt(v @ v))
    if norm <= COSINE_EPS:
        return dunit / COSINE_EPS
    unit = v / norm
    return (dunit - unit * float(unit @ dunit)) / norm


def _cosine_backward(inputs: OracleInputs, x_D: Array, d_E: Array, grads: dict[str, Array]) -> Array:
    p = inputs.params
    z = p["router.proj.weight"] @ x_D
    log_scale = float(p["router.log_scale"].item())
    scale = math.exp(min(log_scale, MAX_LOG_SCALE))
    dunit = np.zeros_like(z)
    for e, m in enumerate(p["router.expert_embeddings"]):
        dunit += d_E[e] * scale * _unit(m)
        grads["router.expert_embeddings"][e] += _unit_backward(m, d_E[e] * scale * _unit(z))
        if log_scale < MAX_LOG_SCALE:
            grads["router.log_scale"] += d_E[e] * scale * float(_unit(z) @ _unit(m))
    dz = _unit_backward(z, dunit)
    grads["router.proj.weight"] += np.outer(dz, x_D)
    return p["router.proj.weight"].T @ dz
