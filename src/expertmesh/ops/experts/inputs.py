"""Arguments of `moe_mlp` and of its parts: checked, cast for autocast, with the backend resolved."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import num_branches
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype
from expertmesh.ops.expert_types import WeightGradients, Weights
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.route_metadata import RouteMetadata
from expertmesh.ops.transforms import refuse_transforms


def make_call(
    x_TD: Tensor,
    w_in: Weights,
    w_out: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in: Weights | None,
    b_out_ED: Tensor | None,
    backend: str,
) -> ExpertsCall:
    """Check, cast and resolve; raises ConfigError as `moe_mlp` says."""
    sliced = not isinstance(w_in, Tensor)
    lists = [
        _slices("w_in", w_in, sliced),
        _slices("w_out", w_out, sliced),
        [] if b_in is None else _slices("b_in", b_in, sliced),
        [] if b_out_ED is None else [b_out_ED],
    ]
    dtype = autocast_dtype(x_TD.device)
    if dtype is not None and x_TD.dtype != torch.float64:
        x_TD = x_TD.to(dtype)
        lists = [[w.to(dtype) for w in several] for several in lists]
    resolved = resolve_backend(backend, x_TD.device, x_TD.dtype)
    if backend == "triton" and x_TD.dtype == torch.float64:
        raise ConfigError(
            "dtype is torch.float64 and backend 'triton'; its experts sum in FP32; use backend='auto'"
        )
    if resolved == "triton" and x_TD.dtype == torch.float64:
        resolved = "torch"
    m = metadata
    maps = [m.offsets_E, m.token_of_row_N, m.slot_of_row_N, m.row_of_slot_N]
    fields: list[Any] = [x_TD, weights_TK, *lists, maps, activation, resolved]
    call = ExpertsCall(*fields)
    if resolved != "reference":
        refuse_transforms("moe_mlp", lambda: call.differentiable)
    _check(call, sliced=sliced)
    return call


def _check(call: ExpertsCall, *, sliced: bool) -> None:
    counts = (len(call.w_in), len(call.w_out), len(call.b_in) or len(call.w_in))
    if len(set(counts)) > 1:
        raise ConfigError(
            f"w_in, w_out, b_in have {counts[0]}, {counts[1]}, {counts[2]} slices; they must have as many; slice all alike"
        )
    G = num_branches(call.activation)
    x, weights = call.x_TD, call.weights_TK
    for i, (w_in, w_out) in enumerate(zip(call.w_in, call.w_out, strict=True)):
        if x.dim() != 2 or w_in.dim() != 4 or w_out.dim() != 3 or weights.dim() != 2:
            raise ConfigError(
                f"x, w_in, w_out, weights have {x.dim()}, {w_in.dim()}, {w_out.dim()}, {weights.dim()} dimensions; "
                "they must have 2 (T, D), 4 (E, G, F, D), 3 (E, D, F), 2 (T, K); reshape them"
            )
        E, F, D = call.w_in[0].shape[0], w_in.shape[2], x.shape[1]
        at = f"[{i}]" if sliced else ""
        _check_tensor(f"w_in{at}", w_in, (E, G, F, D), x.dtype)
        _check_tensor(f"w_out{at}", w_out, (E, D, F), x.dtype)
        if call.b_in:
            _check_tensor(f"b_in{at}", call.b_in[i], (E, G, F), x.dtype)
    for b_out_ED in call.b_out:
        _check_tensor("b_out", b_out_ED, (E, D), x.dtype)
    num_slots = x.shape[0] * weights.shape[1]
    _check_tensor("weights", weights, (x.shape[0], weights.shape[1]))
    _check_tensor("metadata.offsets", call.maps[0], (E + 1,))
    _check_tensor("metadata.row_of_slot", call.maps[3], (num_slots,))


def make_buffers(call: ExpertsCall, main: WeightGradients | None) -> list[Tensor]:
    """Give main gradients in the order of the call's parameters; none where there are none.

    Raises:
        ConfigError: one is missing, or its shape, type or order in memory does not fit its parameter.
    """
    if main is None:
        return []
    first = call.w_in[0]
    interleaved = not first.is_contiguous() and first.transpose(1, 2).is_contiguous()
    found: list[Tensor] = []
    for name in ("w_in", "w_out", "b_in", "b_out"):
        given, parameters = getattr(main, name), getattr(call, name)
        buffers = () if given is None else (given,) if isinstance(given, Tensor) else given
        if len(buffers) != len(parameters):
            raise ConfigError(
                f"main_grads.{name} has {len(buffers)} tensors and {name} {len(parameters)}; they must be as many; "
                "give one buffer per weight"
            )
        for buffer, parameter in zip(buffers, parameters, strict=True):
            wide = accumulate_dtype(parameter.dtype)
            _check_tensor(f"main_grads.{name}", buffer, tuple(parameter.shape), wide)
            kinds = type(buffer.data).__name__, type(parameter.data).__name__
            if kinds[0] != kinds[1] and not torch.compiler.is_compiling():
                raise ConfigError(
                    f"main_grads.{name} is a {kinds[0]} and {name} a {kinds[1]}; both must be of one kind, and FSDP gathers its shards of "
                    "parameters alone; leave main gradients out, or spread the layer with expertmesh.parallel"
                )
            like_w_in = name in ("w_in", "b_in") and interleaved
            if not (buffer.transpose(1, 2) if like_w_in else buffer).is_contiguous():
                raise ConfigError(
                    f"main_grads.{name} has strides {buffer.stride()}; it must lie in memory like w_in, contiguous or "
                    "with interleaved branches; allocate it with torch.zeros_like(w_in)"
                )
        found += buffers
    return found


def _slices(name: str, given: Weights, sliced: bool) -> list[Tensor]:
    if isinstance(given, Tensor) == sliced:
        raise ConfigError(
            f"{name} is {'a tensor' if sliced else 'a list'} and w_in {'a list' if sliced else 'a tensor'}; both must be "
            "tensors or lists of slices; slice both alike"
        )
    if not isinstance(given, Tensor) and not given:
        raise ConfigError(
            f"{name} has no slices; there must be at least one; give the whole tensor"
        )
    return [given] if isinstance(given, Tensor) else list(given)


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {shape} here; check the inputs"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise ConfigError(
            f"{name} has dtype {tensor.dtype} and must have {dtype}; convert it or use autocast"
        )
