"""Plain PyTorch with autograd: the layer as a user would first write it, in the precision of its inputs.

It is the reference of the two-times rule, not an oracle of the choice: the chosen experts and the kept rows are given.
The precision policy is the layer's (docs/numerics.md): routing, losses and the sum over experts in FP32 (FP64 for
FP64 input), expert arithmetic in the layer's dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle.oracle_mlp import GATED_BY
from tests.oracle.oracle_router import COSINE_EPS, MAX_LOG_SCALE, routing_groups
from tests.oracle.oracle_types import OracleOptions

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
    "clamped_silu": lambda h: h.clamp(max=7) * torch.sigmoid(1.702 * h.clamp(max=7)),
}


@dataclass(frozen=True)
class LoopInputs:
    """One call: tensors in the layer's dtype (router parameters in FP32 or FP64), and the choice.

    Attributes:
        x_TD: tokens.
        params: under the names of `MoELayer.state_dict()`.
        expert_ids_TK: chosen experts, E for none.
        kept_TK: bool, rows that are not dropped.
        mask_T: bool, real tokens.
        weights_TK: replayed weights, or None.
        input_factor_TD: jitter and dropout of the router's input, or None.
        noise_TE: logit noise, already scaled, or None.
        output_factor_TK: expert output masking, as a factor, or None.
    """

    x_TD: Tensor
    params: Mapping[str, Tensor]
    expert_ids_TK: Tensor
    kept_TK: Tensor
    mask_T: Tensor
    weights_TK: Tensor | None = None
    input_factor_TD: Tensor | None = None
    noise_TE: Tensor | None = None
    output_factor_TK: Tensor | None = None


def loop_mlp(
    x: Tensor, params: Mapping[str, Tensor], prefix: str, activation: str, expert: int | None = None
) -> Tensor:
    """One MLP on rows (..., D)."""

    def part(name: str) -> Tensor | None:
        value = params.get(prefix + name)
        return value if value is None or expert is None else value[expert]

    w_in, w_out, b_in, b_out = part("w_in"), part("w_out"), part("b_in"), part("b_out")
    assert w_in is not None and w_out is not None
    h = [F.linear(x, w_in[g], None if b_in is None else b_in[g]) for g in range(w_in.shape[0])]
    if activation in GATED_BY:
        up = h[1].clamp(-7, 7) + 1 if activation == "clamped_swiglu" else h[1]
        a = FUNCTIONS[GATED_BY[activation]](h[0]) * up
    else:
        a = FUNCTIONS[activation](h[0])
    return F.linear(a, w_out, b_out)


def loop_logits(inputs: LoopInputs, options: OracleOptions) -> Tensor:
    """(T, E) clean logits in FP32 or FP64."""
    if options.router == "hash":
        wide = torch.float64 if inputs.x_TD.dtype == torch.float64 else torch.float32
        return torch.zeros(len(inputs.x_TD), options.num_experts, dtype=wide)
    weight = inputs.params["router.proj.weight"]
    x = inputs.x_TD.to(weight.dtype)
    if inputs.input_factor_TD is not None:
        x = x * inputs.input_factor_TD
    logits = F.linear(x, weight)
    if options.router == "cosine":
        embeddings = F.normalize(inputs.params["router.expert_embeddings"], dim=-1, eps=COSINE_EPS)
        scale = inputs.params["router.log_scale"].clamp(max=MAX_LOG_SCALE).exp()
        logits = F.normalize(logits, dim=-1, eps=COSINE_EPS) @ embeddings.T * scale
    return logits / options.logit_temperature


def _surviving(weights_TK: Tensor, inputs: LoopInputs, options: OracleOptions) -> Tensor:
    """Given weights of the kept rows; with "kept" they get the sum that all live ones had."""
    kept_TK = weights_TK * inputs.kept_TK
    if options.normalize_weights != "kept":
        return kept_TK
    live_TK = weights_TK * (inputs.expert_ids_TK < options.num_experts)
    total, rest = live_TK.sum(-1, keepdim=True), kept_TK.sum(-1, keepdim=True)
    return torch.where(rest > 0, kept_TK / torch.where(rest > 0, rest, 1.0) * total, 0.0)


def loop_weights(logits_TE: Tensor, inputs: LoopInputs, options: OracleOptions) -> Tensor:
    """(T, K) weights of the kept rows, 0 elsewhere."""
    if inputs.weights_TK is not None:
        return _surviving(inputs.weights_TK, inputs, options)
    ids = inputs.expert_ids_TK
    live = ids < options.num_experts
    safe = ids.clamp(max=options.num_experts - 1)
    if options.router == "hash":
        raw = live.to(logits_TE.dtype)
    elif options.score_function == "softmax_after_topk":
        chosen = logits_TE.gather(1, safe).masked_fill(~live, float("-inf"))
        raw = chosen.masked_fill(~live.any(1, keepdim=True), 0.0).softmax(-1) * live
    elif options.score_function == "sigmoid":
        raw = logits_TE.sigmoid().gather(1, safe) * live
    else:
        raw = logits_TE.softmax(-1).gather(1, safe) * live
    how = options.normalize_weights
    if how == "auto":
        how = "topk" if ids.shape[1] > 1 and options.router != "expert_choice" else "none"
    if how != "none":
        counted = raw * inputs.kept_TK if how == "kept" else raw
        total = counted.sum(-1, keepdim=True)
        raw = torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 0.0)
    return raw * inputs.kept_TK * options.weight_scale


def loop_load(logits_TE: Tensor, noise_TE: Tensor, options: OracleOptions) -> Tensor:
    """(T, E) probability that the expert is chosen if only its own noise is drawn anew."""
    if options.top_k == options.num_experts:
        return torch.ones_like(logits_TE)
    noisy_TE = logits_TE + noise_TE
    columns = []
    for e in range(options.num_experts):
        others = torch.cat([noisy_TE[:, :e], noisy_TE[:, e + 1 :]], dim=1)
        rival = others.topk(options.top_k, dim=1).values[:, -1]
        columns.append(torch.special.ndtr((logits_TE[:, e] - rival) / options.router_noise_std))
    return torch.stack(columns, dim=1)


def loop_losses(logits_TE: Tensor, inputs: LoopInputs, options: OracleOptions) -> tuple[Tensor, Tensor]:
    """Weighted balance loss and z-loss."""
    zero = logits_TE.sum() * 0.0
    valid = inputs.mask_T.nonzero().flatten().tolist()
    if not valid or options.router == "hash":
        return zero, zero
    if options.score_function == "sigmoid":
        p_TE = logits_TE.sigmoid() / logits_TE.sigmoid().sum(-1, keepdim=True)
    else:
        p_TE = logits_TE.softmax(-1)
    load_TE = None
    if inputs.noise_TE is not None and options.router_noise == "gaussian":
        load_TE = loop_load(logits_TE, inputs.noise_TE, options)
    aux = zero
    size = None if options.balance_loss_scope == "global" else options.routing_group_size
    for members in routing_groups(len(logits_TE), size):
        rows = [t for t in members if t in set(valid)]
        if not rows or options.balance_loss == "none":
            continue
        counted = 1 if options.balance_loss == "gshard" else None
        ids = inputs.expert_ids_TK[rows, :counted].flatten()
        counts = torch.bincount(ids, minlength=options.num_experts + 1)[:-1].to(p_TE.dtype)
        importance = p_TE[rows].sum(0)
        load = counts if load_TE is None else load_TE[rows].sum(0)
        if options.balance_loss in ("switch", "gshard"):
            loss = options.num_experts * (counts / counts.sum().clamp(min=1.0) * importance / len(rows)).sum()
        else:
            squared = [v.var(correction=0) / v.mean() ** 2 for v in (importance, load) if v.any()]
            loss = 0.5 * torch.stack([zero, *squared]).sum()
        aux = aux + loss * (len(rows) / len(valid))
    z = logits_TE[valid].logsumexp(-1).square().mean()
    return aux * options.aux_loss_weight, z * options.z_loss_weight


def shuffled(inputs: LoopInputs, *, seed: int) -> tuple[LoopInputs, Tensor]:
    """The same call with D and F in another order, so that every sum rounds differently; gradients reach the originals.

    Also returns the columns that bring the output's D back.
    """
    generator = torch.Generator().manual_seed(seed)
    D, F_ = inputs.x_TD.shape[1], inputs.params["experts.w_out"].shape[-1]
    order_D = torch.randperm(D, generator=generator)
    order_F = torch.randperm(F_, generator=generator)
    params = {}
    for name, value in inputs.params.items():
        last = name.split(".")[-1]
        if name.startswith("experts."):
            value = {
                "w_in": lambda v: v[:, :, order_F][..., order_D],
                "w_out": lambda v: v[:, order_D][..., order_F],
                "b_in": lambda v: v[..., order_F],
                "b_out": lambda v: v[..., order_D],
            }[last](value)
        elif last in ("w_in", "weight") and name != "router.expert_embeddings":
            value = value[..., order_D]
        elif last in ("w_out", "b_out"):
            value = value[order_D]
        params[name] = value
    factor = inputs.input_factor_TD
    moved = replace(
        inputs,
        x_TD=inputs.x_TD[:, order_D],
        params=params,
        input_factor_TD=None if factor is None else factor[:, order_D],
    )
    return moved, order_D.argsort()


def loop_forward(inputs: LoopInputs, options: OracleOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Output (T, D) in the dtype of x, weighted balance loss, weighted z-loss."""
    x_TD, params = inputs.x_TD.masked_fill(~inputs.mask_T[:, None], 0.0), inputs.params
    inputs = replace(inputs, x_TD=x_TD)
    with torch.autocast(x_TD.device.type, enabled=False):
        logits_TE = loop_logits(inputs, options)
        weights_TK = loop_weights(logits_TE, inputs, options)
        if inputs.output_factor_TK is not None:
            weights_TK = weights_TK * inputs.output_factor_TK
        aux, z = loop_losses(logits_TE, inputs, options)
    y_TD = torch.zeros(x_TD.shape, dtype=weights_TK.dtype)
    for e in range(options.num_experts):
        t, k = ((inputs.expert_ids_TK == e) & inputs.kept_TK).nonzero(as_tuple=True)
        out = loop_mlp(x_TD[t], params, "experts.", options.activation, e)
        y_TD = y_TD.index_add(0, t, out.to(y_TD.dtype) * weights_TK[t, k, None])
    y_TD = y_TD.to(x_TD.dtype)
    if "residual_mlp.w_in" in params:
        weight, bias = params["residual_coefficient.weight"], params["residual_coefficient.bias"]
        coefficient = F.linear(x_TD.to(weight.dtype), weight, bias)
        ab = coefficient.to(logits_TE.dtype).softmax(-1).to(y_TD.dtype)
        dense = loop_mlp(x_TD, params, "residual_mlp.", options.activation)
        y_TD = ab[:, :1] * y_TD + ab[:, 1:] * dense
    if "shared_experts.w_in" in params:
        shared_TD = loop_mlp(x_TD, params, "shared_experts.", options.activation)
        if "shared_gate.weight" in params:
            shared_TD = shared_TD * F.linear(x_TD, params["shared_gate.weight"]).sigmoid()
        y_TD = y_TD + shared_TD
    return y_TD.masked_fill(~inputs.mask_T[:, None], 0.0), aux, z
