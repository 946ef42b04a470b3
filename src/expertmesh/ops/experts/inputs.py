"""Arguments of `moe_mlp` and of its parts: checked, cast for autocast, with the backend resolved."""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import num_branches
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype
from expertmesh.ops.expert_types import Experts, WeightGradients, Weights
from expertmesh.ops.experts.slices import ExpertsCall, make_slices
from expertmesh.ops.route_metadata import RouteMetadata


@dataclass(frozen=True)
class Inputs:
    """What `moe_mlp` was called with, after checks and casts.

    Attributes:
        x_TD: (T, D).
        w_in: slices of the first weights; one if they came as a tensor.
        w_out: slices of the second weights.
        weights_TK: (T, K).
        b_in: slices of the first bias; empty without one.
        b_out_ED: second bias, or None.
        maps: of the metadata.
        activation: its name.
        backend: "triton", "torch" or "reference".
        sliced: whether the weights came as slices.
    """

    x_TD: Tensor
    w_in: tuple[Tensor, ...]
    w_out: tuple[Tensor, ...]
    weights_TK: Tensor
    b_in: tuple[Tensor, ...]
    b_out_ED: Tensor | None
    maps: RouteMetadata
    activation: str
    backend: str
    sliced: bool

    @staticmethod
    def of(
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
    ) -> "Inputs":
        """Check, cast and resolve; raises ConfigError as `moe_mlp` says."""
        sliced = not isinstance(w_in, Tensor)
        given = (_slices("w_in", w_in, sliced), _slices("w_out", w_out, sliced))
        biases = () if b_in is None else _slices("b_in", b_in, sliced)
        dtype = autocast_dtype(x_TD.device)
        if dtype is not None and x_TD.dtype != torch.float64:
            x_TD = x_TD.to(dtype)
            given = (tuple(w.to(dtype) for w in given[0]), tuple(w.to(dtype) for w in given[1]))
            biases = tuple(b.to(dtype) for b in biases)
            b_out_ED = None if b_out_ED is None else b_out_ED.to(dtype)
        resolved = resolve_backend(backend, x_TD.device, x_TD.dtype)
        if backend == "triton" and x_TD.dtype == torch.float64:
            raise ConfigError(
                "dtype is torch.float64 and backend 'triton'; its experts sum in FP32; use backend='auto'"
            )
        if resolved == "triton" and x_TD.dtype == torch.float64:
            resolved = "torch"
        inputs = Inputs(
            x_TD, *given, weights_TK, biases, b_out_ED, metadata, activation, resolved, sliced
        )
        inputs._check()
        return inputs

    def call(self) -> ExpertsCall:
        """The same for the backends "torch" and "triton"."""
        slices = make_slices(self.w_in, self.w_out, self.b_in, self.b_out_ED, self.activation)
        return ExpertsCall(self.x_TD, slices, self.weights_TK, self.maps, self.backend)

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """All tensors that may want a gradient."""
        several = (*self.w_in, *self.w_out, *self.b_in)
        last = () if self.b_out_ED is None else (self.b_out_ED,)
        return (self.x_TD, self.weights_TK, *several, *last)

    def _check(self) -> None:
        counts = (len(self.w_in), len(self.w_out), len(self.b_in) or len(self.w_in))
        if len(set(counts)) > 1:
            raise ConfigError(
                f"w_in, w_out, b_in have {counts[0]}, {counts[1]}, {counts[2]} slices; they must have as many; slice all alike"
            )
        G = num_branches(self.activation)
        x, weights = self.x_TD, self.weights_TK
        for i, (w_in, w_out) in enumerate(zip(self.w_in, self.w_out, strict=True)):
            if x.dim() != 2 or w_in.dim() != 4 or w_out.dim() != 3 or weights.dim() != 2:
                raise ConfigError(
                    f"x, w_in, w_out, weights have {x.dim()}, {w_in.dim()}, {w_out.dim()}, {weights.dim()} dimensions; "
                    "they must have 2 (T, D), 4 (E, G, F, D), 3 (E, D, F), 2 (T, K); reshape them"
                )
            E, F, D = self.w_in[0].shape[0], w_in.shape[2], x.shape[1]
            at = f"[{i}]" if self.sliced else ""
            _check_tensor(f"w_in{at}", w_in, (E, G, F, D), x.dtype)
            _check_tensor(f"w_out{at}", w_out, (E, D, F), x.dtype)
            if self.b_in:
                _check_tensor(f"b_in{at}", self.b_in[i], (E, G, F), x.dtype)
        if self.b_out_ED is not None:
            _check_tensor("b_out", self.b_out_ED, (E, D), x.dtype)
        num_slots = x.shape[0] * weights.shape[1]
        _check_tensor("weights", weights, (x.shape[0], weights.shape[1]))
        _check_tensor("metadata.offsets", self.maps.offsets_E, (E + 1,))
        _check_tensor("metadata.row_of_slot", self.maps.row_of_slot_N, (num_slots,))

    def buffers(self, main: WeightGradients) -> tuple[Experts, ...]:
        """Main gradients as slices in the places of the weights.

        Raises:
            ConfigError: one is missing, or its shape, type or order in memory does not fit its weight.
        """
        wide = accumulate_dtype(self.x_TD.dtype)
        pairs = {
            "w_in": (main.w_in, self.w_in),
            "w_out": (main.w_out, self.w_out),
            "b_in": (main.b_in, self.b_in),
            "b_out": (main.b_out, () if self.b_out_ED is None else (self.b_out_ED,)),
        }
        first = self.w_in[0]
        interleaved = not first.is_contiguous() and first.transpose(1, 2).is_contiguous()
        found: dict[str, tuple[Tensor, ...]] = {}
        for name, (given, weights) in pairs.items():
            buffers = () if given is None else (given,) if isinstance(given, Tensor) else given
            found[name] = tuple(buffers)
            if len(buffers) != len(weights):
                raise ConfigError(
                    f"main_grads.{name} has {len(buffers)} tensors and {name} {len(weights)}; they must be as many; "
                    "give one buffer per weight"
                )
            for buffer, weight in zip(buffers, weights, strict=True):
                _check_tensor(f"main_grads.{name}", buffer, tuple(weight.shape), wide)
                like_w_in = name in ("w_in", "b_in") and interleaved
                if not (buffer.transpose(1, 2) if like_w_in else buffer).is_contiguous():
                    raise ConfigError(
                        f"main_grads.{name} has strides {buffer.stride()}; it must lie in memory like w_in, contiguous or "
                        "with interleaved branches; allocate it with torch.zeros_like(w_in)"
                    )
        b_out = found["b_out"][0] if found["b_out"] else None
        return make_slices(found["w_in"], found["w_out"], found["b_in"], b_out, self.activation)


def _slices(name: str, given: Weights, sliced: bool) -> tuple[Tensor, ...]:
    if isinstance(given, Tensor) == sliced:
        raise ConfigError(
            f"{name} is {'a tensor' if sliced else 'a list'} and w_in {'a list' if sliced else 'a tensor'}; both must be "
            "tensors or lists of slices; slice both alike"
        )
    if isinstance(given, Tensor):
        return (given,)
    if not given:
        raise ConfigError(
            f"{name} has no slices; there must be at least one; give the whole tensor"
        )
    return tuple(given)


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
