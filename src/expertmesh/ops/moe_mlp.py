"""The experts of a mixture-of-experts layer as one autograd operator."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops import expert_loop, moe_mlp_triton, reference
from expertmesh.ops.activation import num_branches
from expertmesh.ops.autocast import autocast_dtype, without_autocast
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.expert_loop import Experts, Maps, Needs
from expertmesh.ops.route_metadata import RouteMetadata


def moe_mlp(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in_EGF: Tensor | None = None,
    b_out_ED: Tensor | None = None,
    recompute_h: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Run every token through its experts and sum the weighted results.

    y_t = sum_j (s_tj * act(x_t W_in[e]^T + b_in[e])) W_out[e]^T + s_tj * b_out[e], with e the j-th expert of t
    and s its routing weight. The weight is applied by the experts, so combine is a plain sum and the gradient of
    the weight is rowsum(dA . A). Autograd saves X, the pre-activations H (G * F wide) and the metadata, nothing
    else; gradients are bitwise deterministic; the second derivative is an error, not a wrong number (the
    "reference" backend has it). Sums are FP32 (FP64 for FP64 input), the combine included.

    Args:
        x_TD: (T, D) tokens, float64, float32, bfloat16 or float16. Under autocast x, weights and biases of the
            experts are cast to its type here.
        w_in_EGFD: (E, G, F, D) first weights, G = 2 (gate, up) for gated activations and 1 for plain ones.
        w_out_EDF: (E, D, F) second weights.
        weights_TK: (T, K) routing weights, of any floating-point type (FP32 as routers give them).
        metadata: from `route_metadata`.
        activation: swiglu, geglu, reglu, gelu (erf), relu, relu2 or silu.
        b_in_EGF: (E, G, F) or None.
        b_out_ED: (E, D) or None.
        recompute_h: save X only and compute H again in the backward: one third of the forward's FLOPs more,
            G * N * F elements less. The "reference" backend saves what autograd saves.
        backend: see `resolve_backend`. FP64 runs on PyTorch's GEMMs under "auto", and "triton" refuses it.

    Returns:
        y (T, D) in the type of x (of autocast under autocast).

    Raises:
        ConfigError: shapes or types do not fit one another.
    """
    dtype = autocast_dtype(x_TD.device)
    if dtype is not None and x_TD.dtype != torch.float64:
        x_TD, w_in_EGFD, w_out_EDF = x_TD.to(dtype), w_in_EGFD.to(dtype), w_out_EDF.to(dtype)
        b_in_EGF = None if b_in_EGF is None else b_in_EGF.to(dtype)
        b_out_ED = None if b_out_ED is None else b_out_ED.to(dtype)
    _check(x_TD, w_in_EGFD, w_out_EDF, weights_TK, metadata, activation, b_in_EGF, b_out_ED)
    maps = (
        metadata.offsets_E,
        metadata.token_of_row_N,
        metadata.slot_of_row_N,
        metadata.row_of_slot_N,
    )
    resolved = resolve_backend(backend, x_TD.device, x_TD.dtype)
    if resolved == "reference":
        return reference.moe_mlp(
            x_TD,
            w_in_EGFD,
            w_out_EDF,
            weights_TK,
            *maps,
            activation=activation,
            b_in_EGF=b_in_EGF,
            b_out_ED=b_out_ED,
        )
    inputs = (x_TD, w_in_EGFD, w_out_EDF, weights_TK, b_in_EGF, b_out_ED)
    save_h = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    save_h = save_h and not recompute_h
    if backend == "triton" and x_TD.dtype == torch.float64:
        raise ConfigError(
            "dtype is torch.float64 and backend 'triton'; its experts sum in FP32; use backend='auto'"
        )
    if resolved == "triton" and x_TD.dtype != torch.float64:
        return moe_mlp_triton.moe_mlp(*inputs, Maps(*maps), activation=activation, save_h=save_h)
    return _moe_mlp(*inputs, *maps, activation, save_h)[0]


def _check(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    metadata: RouteMetadata,
    activation: str,
    b_in: Tensor | None,
    b_out: Tensor | None,
) -> None:
    G = num_branches(activation)
    if x.dim() != 2 or w_in.dim() != 4 or w_out.dim() != 3 or weights.dim() != 2:
        raise ConfigError(
            f"x, w_in, w_out, weights have {x.dim()}, {w_in.dim()}, {w_out.dim()}, {weights.dim()} dimensions; "
            "they must have 2 (T, D), 4 (E, G, F, D), 3 (E, D, F), 2 (T, K); reshape them"
        )
    E, F, D = w_in.shape[0], w_in.shape[2], x.shape[1]
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("w_in", w_in, (E, G, F, D)),
        ("w_out", w_out, (E, D, F)),
        ("weights", weights, (x.shape[0], weights.shape[1])),
        ("b_in", b_in, (E, G, F)),
        ("b_out", b_out, (E, D)),
        ("metadata.offsets", metadata.offsets_E, (E + 1,)),
        ("metadata.row_of_slot", metadata.row_of_slot_N, (x.shape[0] * weights.shape[1],)),
    ]
    for name, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}; it must be {shape} here; check the inputs"
            )
    for name, tensor, _ in expected[:2] + expected[3:5]:
        if tensor is not None and tensor.dtype != x.dtype:
            raise ConfigError(
                f"{name} has dtype {tensor.dtype} and x {x.dtype}; they must be equal; convert one or use autocast"
            )


@torch.library.custom_op("expertmesh::moe_mlp", mutates_args=())
def _moe_mlp(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
) -> tuple[Tensor, Tensor]:
    experts = Experts(w_in_EGFD, w_out_EDF, b_in_EGF, b_out_ED, activation)
    maps = Maps(offsets_E, token_of_row_N, slot_of_row_N, row_of_slot_N)
    with without_autocast(x_TD.device):
        return expert_loop.forward(x_TD, experts, weights_TK, maps, save_h=save_h)


@_moe_mlp.register_fake
def _(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
) -> tuple[Tensor, Tensor]:
    num_rows = token_of_row_N.shape[0] if save_h else 0
    h_RH = x_TD.new_empty(num_rows, w_in_EGFD.shape[1] * w_in_EGFD.shape[2])
    return x_TD.new_empty(x_TD.shape[0], x_TD.shape[1]), h_RH


@torch.library.custom_op("expertmesh::moe_mlp_backward", mutates_args=())
def _moe_mlp_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    experts = Experts(w_in_EGFD, w_out_EDF, b_in_EGF, b_out_ED, activation)
    maps = Maps(offsets_E, token_of_row_N, slot_of_row_N, row_of_slot_N)
    with without_autocast(x_TD.device):
        if h_RH.shape[0] != token_of_row_N.shape[0]:
            _, h_RH = expert_loop.forward(x_TD, experts, weights_TK, maps, save_h=True)
        grads = expert_loop.backward(
            grad_TD.contiguous(), x_TD, h_RH, experts, weights_TK, maps, Needs(*needs)
        )
    return (
        grads.x_TD,
        grads.w_in_EGFD,
        grads.w_out_EDF,
        grads.weights_TK,
        grads.b_in_EGF,
        grads.b_out_ED,
    )


@_moe_mlp_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        if tensor is None or not needed:
            return x_TD.new_empty(0)
        return tensor.new_empty(tensor.shape)

    need_x, need_w_in, need_w_out, need_weights, need_b_in, need_b_out = needs
    return (
        like(x_TD, need_x),
        like(w_in_EGFD, need_w_in),
        like(w_out_EDF, need_w_out),
        like(weights_TK, need_weights),
        like(b_in_EGF, need_b_in),
        like(b_out_ED, need_b_out),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_in, w_out, weights, b_in, b_out, *maps, activation, _ = inputs
    ctx.save_for_backward(x, output[1], w_in, w_out, weights, b_in, b_out, *maps)
    ctx.activation = activation
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_TD: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:6])
    rest = (None,) * 6
    if grad_TD is None:
        return (None,) * 6 + rest
    grads = _moe_mlp_backward(grad_TD, *ctx.saved_tensors, ctx.activation, needs)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True)) + rest


def _double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "moe_mlp has no second derivative; use backend='reference' where one is needed (gradient penalties)"
    )


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
_moe_mlp_backward.register_autograd(_double_backward)
