"""FP64 NumPy: balance losses and z-loss over routing groups, forwards and backwards by hand."""

from collections.abc import Iterator

import numpy as np

from tests.oracle.oracle_router import Routed, routing_groups, softmax
from tests.oracle.oracle_types import Array, OracleOptions


def loss_groups(mask_T: Array, options: OracleOptions) -> Iterator[tuple[list[int], float]]:
    """Valid tokens of each group with the group's share of all valid tokens; empty groups are left out."""
    size = None if options.balance_loss_scope == "global" else options.routing_group_size
    total = int(mask_T.sum())
    for members in routing_groups(len(mask_T), size):
        valid = [t for t in members if mask_T[t]]
        if valid:
            yield valid, len(valid) / total


def _choice_counts(ids_TK: Array, valid: list[int], num_experts: int) -> Array:
    return np.array([(ids_TK[valid] == e).sum() for e in range(num_experts)], dtype=np.float64)


def _balanced_choices(routed: Routed, options: OracleOptions) -> Array:
    return routed.ids_TK[:, :1] if options.balance_loss == "gshard" else routed.ids_TK


def balance_loss(routed: Routed, mask_T: Array, options: OracleOptions) -> float:
    """Unweighted balance loss: the mean over groups, each weighing as many as it has valid tokens.

    gshard: the same as switch with the tokens' first choices only.
    switch: E * sum_e f_e P_e, with f_e the share of the group's rows that chose e before dropping and P_e the
    mean probability. importance_load: (CV^2(importance) + CV^2(load)) / 2, CV^2 the variance (of the population)
    over the squared mean; importance_e the sum of probabilities, load_e the (expected) number of rows.
    """
    if options.balance_loss == "none" or options.router == "hash":
        return 0.0
    total = 0.0
    for valid, share in loss_groups(mask_T, options):
        importance_E = routed.probabilities_TE[valid].sum(0)
        counts_E = _choice_counts(_balanced_choices(routed, options), valid, options.num_experts)
        if options.balance_loss in ("switch", "gshard"):
            rows = max(counts_E.sum(), 1.0)
            total += share * options.num_experts * float(counts_E / rows @ importance_E) / len(valid)
        else:
            load_E = counts_E if routed.load_TE is None else routed.load_TE[valid].sum(0)
            total += share * 0.5 * (_cv_squared(importance_E) + _cv_squared(load_E))
    return total


def _cv_squared(v_E: Array) -> float:
    mean = float(v_E.mean())
    return float(((v_E - mean) ** 2).mean()) / mean**2 if mean else 0.0


def _cv_squared_backward(v_E: Array) -> Array:
    mean, n = float(v_E.mean()), len(v_E)
    if not mean:
        return np.zeros_like(v_E)
    variance = float(((v_E - mean) ** 2).mean())
    return 2.0 * (v_E - mean) / (n * mean**2) - 2.0 * variance / (n * mean**3)


def balance_loss_backward(routed: Routed, mask_T: Array, options: OracleOptions, dloss: float) -> tuple[Array, Array]:
    """Gradients of the probabilities (T, E) and of the load probabilities (T, E); the choice itself has none."""
    dp_TE, dload_TE = np.zeros_like(routed.probabilities_TE), np.zeros_like(routed.probabilities_TE)
    if options.balance_loss == "none" or options.router == "hash":
        return dp_TE, dload_TE
    for valid, share in loss_groups(mask_T, options):
        if options.balance_loss in ("switch", "gshard"):
            counts_E = _choice_counts(_balanced_choices(routed, options), valid, options.num_experts)
            rows = max(counts_E.sum(), 1.0)
            dp_TE[valid] = dloss * share * options.num_experts * counts_E / rows / len(valid)
        else:
            dp_TE[valid] = dloss * share * 0.5 * _cv_squared_backward(routed.probabilities_TE[valid].sum(0))
            if routed.load_TE is not None:
                dload_TE[valid] = dloss * share * 0.5 * _cv_squared_backward(routed.load_TE[valid].sum(0))
    return dp_TE, dload_TE


def log_sum_exp(z_E: Array) -> float:
    """log sum exp(z), without overflow."""
    top = float(z_E.max())
    return top + float(np.log(np.exp(z_E - top).sum()))


def z_loss(routed: Routed, mask_T: Array, options: OracleOptions) -> float:
    """Unweighted router z-loss: mean over valid tokens of logsumexp(logits)^2 (ST-MoE, eq. 5)."""
    valid = [t for t in range(len(mask_T)) if mask_T[t]]
    if not valid or options.router == "hash":
        return 0.0
    return sum(log_sum_exp(routed.logits_TE[t]) ** 2 for t in valid) / len(valid)


def z_loss_backward(routed: Routed, mask_T: Array, options: OracleOptions, dloss: float) -> Array:
    """Gradient of the logits."""
    dlogits_TE = np.zeros_like(routed.logits_TE)
    valid = [t for t in range(len(mask_T)) if mask_T[t]]
    if options.router == "hash":
        return dlogits_TE
    for t in valid:
        z_E = routed.logits_TE[t]
        dlogits_TE[t] = dloss * 2.0 * log_sum_exp(z_E) * softmax(z_E) / len(valid)
    return dlogits_TE
