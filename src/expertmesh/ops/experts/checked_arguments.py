"""Checks of the experts' arguments: casts for autocast and resolves the backend."""

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import num_branches
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.check import check_like
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import ExpertWeights, WeightGradients
from expertmesh.ops.route_metadata import RouteMetadata
from expertmesh.ops.transforms import refuse_transforms


def checked(call: ExpertsCall, maps: RouteMetadata) -> ExpertsCall:
    """Check a call and add its maps; cast it for autocast, and resolve its backend to "torch", "triton" or
    "reference"."""
    x_TD, experts = call.x_TD, call.experts
    dtype = autocast_dtype(x_TD.device)
    if dtype is not None and x_TD.dtype != torch.float64:
        x_TD, experts = x_TD.to(dtype), experts.to(dtype)
    name = resolve_backend(call.backend, x_TD.device, x_TD.dtype)
    if call.backend == "triton" and x_TD.dtype == torch.float64:
        raise ConfigError("dtype is torch.float64 and backend 'triton'; its experts sum in FP32; use backend='auto'")
    if name == "triton" and x_TD.dtype == torch.float64:
        name = "torch"
    if name == "reference" and call.batch_invariant:
        raise ConfigError(
            "backend='reference' with batch_invariant: its sums follow the batch; use auto, torch or triton"
        )
    call = call._replace(x_TD=x_TD, experts=experts, backend=name, ids_TK=None, maps=maps)
    if name != "reference":
        refuse_transforms("moe_mlp", lambda: call.differentiable)
    _check(call, maps)
    return call


def _check(call: ExpertsCall, maps: RouteMetadata) -> None:
    w = call.experts
    counts = (len(w.w_in), len(w.w_out), len(w.b_in) or len(w.w_in))
    if len(set(counts)) > 1:
        raise ConfigError(
            f"w_in, w_out, b_in have {counts[0]}, {counts[1]}, {counts[2]} slices; they must have as many; slice all "
            "alike"
        )
    G = num_branches(w.activation)
    x, weights = call.x_TD, call.weights_TK
    if w.format == "dense":
        _check_dense(w, x, weights, G)
    E, D = w.num_slots, x.shape[1]
    for i, (b_in, one) in enumerate(zip(w.b_in, w.slices(), strict=False)):
        check_like(f"b_in{_at(w, i)}", b_in, (E, G, one.shape[2]), x.dtype)
    if w.b_out is not None:
        check_like("b_out", w.b_out, (E, D), x.dtype)
    num_slots = x.shape[0] * weights.shape[1]
    check_like("weights", weights, (x.shape[0], weights.shape[1]))
    check_like("metadata.offsets", maps.offsets_E, (E + 1,))
    check_like("metadata.row_of_slot", maps.row_of_slot_N, (num_slots,))


def _check_dense(w: ExpertWeights, x: Tensor, weights: Tensor, G: int) -> None:
    for i, (w_in, w_out) in enumerate(zip(w.w_in, w.w_out, strict=True)):
        if x.dim() != 2 or w_in.dim() != 4 or w_out.dim() != 3 or weights.dim() != 2:
            raise ConfigError(
                f"x, w_in, w_out, weights have {x.dim()}, {w_in.dim()}, {w_out.dim()}, {weights.dim()} dimensions; "
                "they must have 2 (T, D), 4 (E, G, F, D), 3 (E, D, F), 2 (T, K); reshape them"
            )
        E, F, D = w.num_slots, w_in.shape[2], x.shape[1]
        check_like(f"w_in{_at(w, i)}", w_in, (E, G, F, D), x.dtype)
        check_like(f"w_out{_at(w, i)}", w_out, (E, D, F), x.dtype)


def _at(w: ExpertWeights, i: int) -> str:
    return "" if w.is_whole else f"[{i}]"


def main_buffers(experts: ExpertWeights, main: WeightGradients | None) -> list[Tensor]:
    """Return main gradients in the order of the experts' parameters; [] if there are none."""
    if main is None:
        return []
    first = experts.w_in[0]
    interleaved = not first.is_contiguous() and first.transpose(1, 2).is_contiguous()
    given = main.by_name()
    b_out = () if experts.b_out is None else (experts.b_out,)
    parameters = {
        "w_in": experts.w_in,
        "w_out": experts.w_out,
        "b_in": experts.b_in,
        "b_out": b_out,
    }
    found: list[Tensor] = []
    for name, own in parameters.items():
        if len(given[name]) != len(own):
            raise ConfigError(
                f"main_grads.{name} has {len(given[name])} tensors and {name} {len(own)}; they must be as many; "
                "give one buffer per weight"
            )
        for buffer, parameter in zip(given[name], own, strict=True):
            wide = accumulate_dtype(parameter.dtype)
            check_like(f"main_grads.{name}", buffer, tuple(parameter.shape), wide)
            kinds = type(buffer.data).__name__, type(parameter.data).__name__
            if kinds[0] != kinds[1] and not torch.compiler.is_compiling():
                raise ConfigError(
                    f"main_grads.{name} is a {kinds[0]} and {name} a {kinds[1]}; both must be of one kind, and FSDP "
                    "gathers its shards of parameters alone; leave main gradients out, or spread the layer with "
                    "expertmesh.parallel"
                )
            like_w_in = name in ("w_in", "b_in") and interleaved
            if not (buffer.transpose(1, 2) if like_w_in else buffer).is_contiguous():
                raise ConfigError(
                    f"main_grads.{name} has strides {buffer.stride()}; it must lie in memory like w_in, contiguous or "
                    "with interleaved branches; allocate it with torch.zeros_like(w_in)"
                )
        found += given[name]
    return found
