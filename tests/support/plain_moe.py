"""The documented semantics of the older systems' layers as a loop over tokens and choices, in plain PyTorch."""

import inspect

import torch

from tests.oracle.numerics import assert_close_fp64


def plain_signature(function):
    """The signature of a function without its annotations, as text."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def assert_plain(y, l_aux, counts, expected):
    """The output of a layer, its balance loss and its counts are those of `plain_moe`; None: that is not compared."""
    assert_close_fp64(y.detach().flatten(0, -2), expected[0].detach(), what="y")
    if l_aux is not None:
        assert_close_fp64(l_aux.detach(), expected[1].detach(), what="l_aux")
    assert torch.equal(counts, expected[2])


def plain_moe(x_TD, w_gate_ED, experts, *, k, capacity=None, policy="first", normalize="none", mask_T=None):
    """Give (y, balance loss, choices per expert) of one call.

    Args:
        x_TD: tokens.
        w_gate_ED: the gate's weight.
        experts: one callable per expert.
        k: experts per token.
        capacity: rows per expert; None: all.
        policy: who is served first: "first" (first choices in token order, then second ones), "priority" (the same with
            tokens by their largest probability), "weight" (choices by weight, undivided for
            "kept").
        normalize: "none", "topk" or "kept".
        mask_T: True for tokens that count.
    """
    T, E = len(x_TD), len(experts)
    p_TE = torch.softmax(x_TD @ w_gate_ED.T, -1)
    mask_T = torch.ones(T, dtype=torch.bool) if mask_T is None else mask_T
    ids = p_TE.topk(k, -1).indices.tolist()
    live = [t for t in range(T) if mask_T[t]]
    weight_TE = p_TE
    if normalize == "topk":
        weight_TE = p_TE / p_TE.topk(k, -1).values.sum(-1, keepdim=True)
    pairs = [(j, t) for j in range(k) for t in live]
    if policy == "priority":
        pairs.sort(key=lambda jt: (jt[0], -float(p_TE[jt[1]].max())))
    if policy == "weight":
        pairs.sort(key=lambda jt: -float(weight_TE[jt[1], ids[jt[1]][jt[0]]]))
    taken, kept = [0] * E, {t: [] for t in range(T)}
    for j, t in pairs:
        e = ids[t][j]
        taken[e] += 1
        if capacity is None or taken[e] <= capacity:
            kept[t].append(e)
    rows = []
    for t in range(T):
        among = {"none": None, "topk": ids[t], "kept": kept[t]}[normalize]
        total = 1.0 if among is None else p_TE[t, among].sum()
        parts = [p_TE[t, e] / total * experts[e](x_TD[t : t + 1])[0] for e in sorted(kept[t])]
        rows.append(sum(parts) if parts else torch.zeros_like(x_TD[t]))
    counts = torch.zeros(E, dtype=torch.int64)
    first = torch.zeros(E, dtype=x_TD.dtype)
    for t in live:
        first[ids[t][0]] += 1
        for e in ids[t]:
            counts[e] += 1
    share = (first if k == 2 else counts.to(x_TD.dtype) / k) / len(live)
    l_aux = E * (share * p_TE[mask_T].mean(0)).sum()
    return torch.stack(rows), l_aux, counts
