"""Routed experts (grouped tensors, or one custom module per expert) and the dense MLP beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.moe.expert_paging import ExpertPaging
from expertmesh.moe.module_adapters import ModuleAdapters
from expertmesh.ops.activation import num_branches
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.call import ExpertsCall, TokenAdapters
from expertmesh.ops.experts.deferred_wgrad import DeferredWeightGradients
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import (
    FORMATS,
    TENSORS,
    ExpertWeights,
    WeightGradients,
)
from expertmesh.ops.op_set import DEFAULT_OPS, NO_ADAPTERS, OpSet
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import route_metadata

OfTokens = Callable[[int], TokenAdapters | None]
"""Function of the number of tokens that returns the adapters of the current call's tokens. The model's caller keeps it
up to date."""


def _adapters_of(of_tokens: list[OfTokens], x_TD: Tensor) -> TokenAdapters | None:
    """Adapters of tokens by the function that knows some: steps of two engines do not overlap."""
    found = (of(len(x_TD)) for of in tuple(of_tokens))
    return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class ExpertParameters:
    """Weights for one call, indexed by its expert ids, and what their owner does with their gradients (see
    `moe_mlp`)."""

    weights: ExpertWeights
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # around the operator
    main_grads: WeightGradients | None = None
    late: DeferredWeightGradients | None = None


class DenseMLP(nn.Module):
    """A feed-forward block that every token passes: shared experts, or the residual MLP of PR-MoE.

    Parameters: w_in (G, F, D) with G = 2 (gate, up) for gated activations and 1 otherwise, w_out (D, F), and with
    bias b_in (G, F), b_out (D,).
    """

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        activation: str,
        bias: bool,
        arithmetic: OpSet = DEFAULT_OPS,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the parameters; the layer initialises them. `backend` is read by the batch-invariant op set only."""
        super().__init__()
        branches = num_branches(activation)
        self.activation = activation
        self.adapters: ModuleAdapters | None = None
        self.of_tokens: list[OfTokens] = []
        self.arithmetic, self.backend = arithmetic, backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.w_in = parameter(branches, hidden_dim, dim)
        self.w_out = parameter(dim, hidden_dim)
        self.b_in = parameter(branches, hidden_dim) if bias else None
        self.b_out = parameter(dim) if bias else None

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices, which may have adapters, by name."""
        return {"w_in": tuple(self.w_in.shape), "w_out": tuple(self.w_out.shape)}

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, D), in x's dtype or autocast's."""
        return self.arithmetic.in_mode(self.training).mlp(
            x_TD,
            self.w_in,
            self.w_out,
            activation=self.activation,
            b_in_GF=self.b_in,
            b_out_D=self.b_out,
            backend=self.backend,
            adapters=NO_ADAPTERS if self.adapters is None else self.adapters(),
            of_tokens=_adapters_of(self.of_tokens, x_TD),
        )


class GroupedExperts(nn.Module):
    """E experts in stacked tensors, run by one autograd operator (`expertmesh.functional.moe_mlp`).

    Parameters: w_in (E, G, F, D), w_out (E, D, F), and with bias b_in (E, G, F), b_out (E, D). In another format than
    "dense" (`ops/experts/quantized_formats.py`) they are frozen buffers, with w_in_scale and w_out_scale beside them.

    Args:
        recompute_h: recompute the pre-activations in the backward instead of saving them; bitwise the same results.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    w_in_scale: Tensor | None
    w_out_scale: Tensor | None

    def __init__(
        self,
        *,
        num_experts: int,  # E
        dim: int,  # D
        hidden_dim: int,  # F
        activation: str,  # swiglu, geglu, reglu, gelu, relu, relu2, silu or clamped_swiglu
        bias: bool,  # whether the experts have b_in and b_out
        recompute_h: bool = False,
        arithmetic: OpSet = DEFAULT_OPS,  # the op set in evaluation
        backend: str = "auto",  # see `ops.backend.resolve_backend`
        device: torch.device | str | None = None,  # the device of the parameters
        dtype: torch.dtype | None = None,  # the type of the parameters
    ) -> None:
        """Allocate the parameters; the layer initialises them."""
        super().__init__()
        branches = num_branches(activation)
        self.num_experts, self.activation, self.backend = num_experts, activation, backend
        self.recompute_h, self.arithmetic = recompute_h, arithmetic
        self.main_grads: WeightGradients | None = None
        self.adapters: ModuleAdapters | None = None
        self.of_tokens: list[OfTokens] = []
        self.compute_device: torch.device | None = None  # if not the parameters'
        # slots in place of the tensors, see `put_into_slots`; None: all experts are here
        self.paging: ExpertPaging | None = None
        self._dtype = torch.bfloat16  # of the products of quantised experts

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        tensors = {
            "w_in": empty(num_experts, branches, hidden_dim, dim),
            "w_out": empty(num_experts, dim, hidden_dim),
        }
        if bias:
            tensors["b_in"] = empty(num_experts, branches, hidden_dim)
            tensors["b_out"] = empty(num_experts, dim)
        self.hold("dense", tensors)

    def hold(self, format: str, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> None:
        """Replace all tensors, by name: parameters of a dense format, else frozen buffers for products in a dtype
        (None: as before)."""
        for name in TENSORS:
            if name in self._parameters or name in self._buffers:
                delattr(self, name)
            tensor = tensors.get(name)
            if format == "dense" and not name.endswith("_scale"):
                self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.format, self._dtype = format, dtype or self._dtype

    def room(
        self,
        format: str,  # name of the format
        *,
        dtype: torch.dtype,  # dtype of the products, and of scales whose type the format leaves open
        group_size: int = 64,  # input columns per scale, where the format leaves it open
    ) -> dict[str, Tensor]:
        """Tensors of a format for `hold`, on the same device: the biases, and matrices without values, which `put`
        writes."""
        E, G, F, D = self.shape
        form, device = FORMATS[format], self.w_in.device
        unit = form.columns(group_size)
        if D % unit or F % unit:
            raise ConfigError("format", format, f"groups of {unit} must divide {D} and {F}", "use int8")
        found = {n: b.detach() for n in ("b_in", "b_out") if (b := getattr(self, n)) is not None}
        for name, size in (("w_in", (E, G, F, D)), ("w_out", (E, D, F))):
            kept = form.kept(size, dtype, group_size)
            for end, (shape, kind) in kept.items():
                found[name + end] = torch.empty(shape, dtype=kind, device=device)
        return found

    @torch.no_grad()
    def put(self, name: str, expert: int, w: Tensor) -> None:
        """Write one expert's w_in (G, F, D) or w_out (D, F), rounded to the format."""
        unit = FORMATS[self.format].unit(self.weights().slices()[0])
        own = {n: getattr(self, n) for n in (name, f"{name}_scale")}
        _put(own, self.format, name, expert, w.to(self.dtype), unit)

    @torch.no_grad()
    def convert(self, format: str, *, group_size: int = 64, dtype: torch.dtype | None = None) -> None:
        """Round the matrices to a format, or widen them to "dense", one expert at a time; adapters stay, main gradients
        go.

        Dense matrices are new parameters, for an optimizer made afterwards.

        Args:
            format: dense, int8, int4, nf4, fp8 or mxfp4.
            group_size: input columns per scale of int4 and nf4.
            dtype: dtype of dense matrices, or of the products; None: as it is.
        """
        known = [name for name, one in FORMATS.items() if one.name == name]
        if format not in known:
            raise ConfigError("format", format, f"must be {' or '.join(known)}", "use int8")
        if self.paging is not None or type(self.w_in.data) is not Tensor:
            raise ConfigError("format", format, "experts are in slots or on several ranks", "convert before")
        dtype, before = dtype or self.dtype, self.weights().slices()[0]
        E, G, F, D = before.shape
        found = self.room(format, dtype=dtype, group_size=group_size)
        for expert in range(E):
            w_in = before.w_in(expert, dtype).view(G, F, D)
            for name, w in (("w_in", w_in), ("w_out", before.w_out(expert, dtype))):
                _put(found, format, name, expert, w, group_size)
        self.main_grads = None
        self.hold(format, found, dtype=dtype)

    def put_into_slots(self, num_slots: int, **how: Any) -> "ExpertPaging":
        """Keep `num_slots` experts only, for inference; see `ExpertPaging` for the arguments. The state dict is then
        empty."""
        self.paging = ExpertPaging(self, num_slots=num_slots, **how)
        self.hold(self.format, {})
        return self.paging

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (E, G, F, D) of the matrices, of all experts that are here."""
        return self.weights().slices()[0].shape

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacks of matrices in any format, which may have adapters, by name."""
        E, G, F, D = self.shape
        return {"w_in": (E, G, F, D), "w_out": (E, D, F)}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, or of the products of quantised ones."""
        is_dense = self.format == "dense"
        return self.weights().w_in[0].dtype if is_dense else self._dtype

    def _apply(self, fn: Any, recurse: bool = True) -> "GroupedExperts":
        """Move or cast; dtypes of quantised numbers stay, because a rounded scale is another weight."""
        biases = {id(t) for t in (self.b_in, self.b_out)}

        def moved(tensor: Tensor) -> Tensor:
            found: Tensor = fn(tensor)
            if found.dtype == tensor.dtype or id(tensor) in biases:
                return found
            return tensor if found.device == tensor.device else tensor.to(found.device)

        for child in self.children() if recurse else ():
            child._apply(fn)
        super()._apply(fn if self.format == "dense" else moved, recurse=False)
        return self

    def accumulate_main_grads(self, enabled: bool = True) -> None:
        """Accumulate the gradients of all parameters in FP32 buffers, `self.main_grads`, from now on.

        The parameters' `.grad` stays None, and gradients are not rounded to the parameters' dtype between
        micro-batches. Before the optimizer step, hand the buffers over (`experts.w_in.grad = experts.main_grads.w_in`
        where the parameters are FP32, or to FP32 master weights), after it call `zero_main_grads`. The buffers start at
        zero on the parameters' current device and are in no state dict. Gradient hooks and DDP do not see these
        gradients; see `main_grads` of `moe_mlp` for the other limits.

        Args:
            enabled: False goes back to autograd's gradients and drops the buffers.
        """
        if enabled and (self.format != "dense" or self.paging is not None):
            raise ConfigError(f"main gradients of {self.format} experts: they are frozen; leave main gradients out")

        def buffer(parameter: Tensor | None) -> Tensor | None:
            if parameter is None:
                return None
            return torch.zeros_like(parameter, dtype=accumulate_dtype(parameter.dtype), requires_grad=False)

        parameters = (self.w_in, self.w_out, self.b_in, self.b_out)
        self.main_grads = WeightGradients(*map(buffer, parameters)) if enabled else None

    @torch.no_grad()
    def zero_main_grads(self) -> None:
        """Set the buffers of `accumulate_main_grads` to zero, for the next step."""
        for buffer in () if self.main_grads is None else vars(self.main_grads).values():
            if buffer is not None:
                buffer.zero_()

    def forward(
        self,
        x_TD: Tensor,  # (T, D)
        expert_ids_TK: Tensor,  # (T, K) in [0, E]; E is skipped
        weights_TK: Tensor,  # (T, K)
        *,
        max_rows: int | None,  # upper bound on the number of ids below E, guaranteed by the caller; or None
        parameters: ExpertParameters | None = None,
    ) -> Tensor:
        """Weighted sum of the chosen experts' outputs per token.

        Args:
            parameters: weights that replace this module's own, indexed by the ids; or None.

        Returns:
            (T, D) in x's dtype or autocast's. Does not synchronise on a GPU.
        """
        if parameters is not None:
            own = parameters
        elif self.paging is not None:
            weights = self.paging.weights(x_TD, expert_ids_TK)
            own = ExpertParameters(weights, torch.no_grad)  # the next call changes them
        else:
            own = ExpertParameters(self.weights(), main_grads=self.main_grads)
        arithmetic = self.arithmetic.in_mode(self.training)
        call = ExpertsCall(
            x_TD,
            weights_TK,
            own.weights,
            self.backend,
            expert_ids_TK,
            batch_invariant=arithmetic.batch_invariant,
        )
        if self.adapters is not None:
            call = call._replace(adapters=self.adapters())
        if self.of_tokens:
            call = call._replace(of_tokens=_adapters_of(self.of_tokens, x_TD))
        if call.has_adapters:
            call = call._replace(batch_invariant=arithmetic.is_invariant_for(x_TD))
        if self.main_grads is not None and torch.is_grad_enabled():
            self._check_main_grads(call.batch_invariant)
        with own.context():
            return compute(
                call,
                max_rows=max_rows,
                recompute_h=self.recompute_h,
                main_grads=own.main_grads,
                late=own.late,
            )

    def weights(self) -> ExpertWeights:
        """The tensors as the operators take them; of experts in slots those that have one."""
        if self.paging is not None:
            return self.paging.in_slots()
        return ExpertWeights(
            (self.w_in,),
            (self.w_out,),
            self.activation,
            () if self.b_in is None else (self.b_in,),
            self.b_out,
            self.format,
            () if self.w_in_scale is None else (self.w_in_scale,),
            () if self.w_out_scale is None else (self.w_out_scale,),
        )

    def _check_main_grads(self, is_invariant: bool) -> None:
        """Raise ConfigError if the backward of this call would not add to the main gradients."""
        if is_invariant:
            raise ConfigError(
                "batch_invariant=True with main gradients in evaluation: its backward does not add to them; "
                "compute under torch.no_grad(), or call layer.train()"
            )
        if self.adapters is not None and self.w_in.requires_grad:
            raise ConfigError(
                "main gradients with adapters (expertmesh.lora): their backward does not add to them; "
                "freeze the experts, or call accumulate_main_grads(False)"
            )


def _put(into: Mapping[str, Tensor], format: str, name: str, expert: int, w: Tensor, group_size: int) -> None:
    """Write one expert's matrix, in the dtype of the products, into tensors of a format."""
    if format != "dense" and not w.isfinite().all():
        fix = "mend them first"
        raise ConfigError("format", format, f"{name} has numbers that are not finite", fix)
    for end, value in FORMATS[format].pack(w, w.dtype, group_size).items():
        into[name + end][expert].copy_(value)


def _checked(y: Any, index: int, x_nD: Tensor) -> Tensor:
    """Return a custom expert's output after checking it."""
    if isinstance(y, Tensor) and y.shape == x_nD.shape and y.is_floating_point():
        return y
    found = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    raise ConfigError(
        f"experts[{index}] returned {found} for rows of shape {tuple(x_nD.shape)}; it must return one floating-point "
        "tensor of that"
        " shape; fix its forward"
    )


Parameters = Sequence[Sequence[Tensor]]
"""Parameters of each expert."""


class ExpertList(nn.ModuleList):
    """Experts that are custom modules, one per expert; each is called on its own (n, D) rows with n > 0."""

    def __init__(self, experts: Iterable[nn.Module], *, backend: str = "auto") -> None:
        """Hold the modules; their parameters are named experts.INDEX.NAME."""
        super().__init__(experts)
        self.num_experts, self.backend = len(self), backend

    def forward(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None,
        parameters: ExpertParameters | None = None,
    ) -> Tensor:
        """Compute weighted sums as `GroupedExperts.forward` does; waits on the host for the number of rows of each
        expert.

        `parameters` must be None: modules keep their own. The routing weight multiplies an expert's output. An expert
        without a row is not called, and the gradients of its parameters are zeros, as in grouped experts.
        """
        assert parameters is None, "modules keep their own parameters"
        metadata = route_metadata(expert_ids_TK, self.num_experts, max_rows=max_rows, backend=self.backend)
        x_TD, callables, parameters_of = self.callables(x_TD)
        x_RD = permute(x_TD, metadata, backend=self.backend)
        bounds = metadata.offsets_E.tolist()
        rows = [
            _checked(expert(x_RD[start:end]), index, x_RD[start:end])
            for index, (expert, start, end) in enumerate(zip(callables, bounds, bounds[1:], strict=False))
            if end > start
        ]
        dead = x_RD.new_zeros(x_RD.shape[0] - bounds[-1], x_TD.shape[1])
        # zero rows of x and of idle experts' parameters put these into the graph, so that their gradients are zeros
        idle = zip(parameters_of, bounds, bounds[1:], strict=False)
        unused = [p for found, start, end in idle if end == start for p in found]
        dead = torch.cat((dead, x_RD[:0], *no_rows(unused, like=x_RD)))
        y_RD = torch.cat([*rows, dead.to(rows[0].dtype) if rows else dead])
        weights_R = weights_TK.flatten()[metadata.slot_of_row_N.long()]
        weighted_RD = y_RD.to(weights_R.dtype) * weights_R[:, None]
        y_TD = combine(weighted_RD, metadata, expert_ids_TK.shape[1], backend=self.backend)
        return y_TD.to(y_RD.dtype)

    def callables(self, x_TD: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]], Parameters]:
        """Tokens, experts and parameters of each expert for one call; a subclass may insert a step before the
        experts."""
        experts = list(self.children())
        return x_TD, [*experts], [list(expert.parameters()) for expert in experts]


def no_rows(parameters: Iterable[Tensor], *, like: Tensor) -> list[Tensor]:
    """(0, D) slices of parameters, in the dtype of `like` (n, D): a `torch.cat` with them gives zero gradients, even if
    weights are not finite.

    Parameters without a gradient and DTensors are left out.
    """
    if not torch.is_grad_enabled():
        return []
    return [
        p.flatten()[:0].view(0, like.shape[1]).to(like.dtype)
        for p in parameters
        if p.requires_grad and p.is_floating_point() and not hasattr(p, "device_mesh")
    ]


class FirstOutput(nn.Module):
    """Wraps an expert whose forward may return a tuple: its first entry counts. `expert` is None if it is on another
    rank."""

    def __init__(self, expert: nn.Module | None) -> None:
        """Hold the expert as `expert`."""
        super().__init__()
        self.expert = expert

    def forward(self, x_RD: Tensor) -> Tensor:
        """(n, D) -> (n, D)."""
        assert self.expert is not None, "the expert is on another rank"
        y = self.expert(x_RD)
        first: Tensor = y[0] if isinstance(y, tuple) else y
        return first
