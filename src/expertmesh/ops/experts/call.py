"""Arguments of the experts' operators, and the loop over slices of their weights.

y = act(x W_in^T) W_out^T is a sum over the hidden units, so each slice of F acts as a smaller expert, and the results
of the slices add up. Nothing is concatenated: gathered shards are used where they lie. Results of the slices, (T, D)
each, are added in FP32 (FP64 for FP64) in the order of the slices.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.weights import (
    ExpertSlice,
    ExpertWeights,
    HiddenGradients,
    Needs,
)
from expertmesh.ops.route_metadata import RouteMetadata


class LowRank(NamedTuple):
    """Low-rank adapter of every expert's matrix W: W + scaling * B A."""

    a_ErK: Tensor  # (E, r, K), or (1, r, K) if all experts share it
    b_ENr: Tensor  # (E, N, r), or (1, N, r)
    scaling: float  # s
    is_shared: bool  # whether all experts share it
    drop: Callable[[Tensor], Tensor] | None = None  # dropout of its input, of a dense matrix


class TokenAdapters(NamedTuple):
    """A adapters of a module's matrices, of which each token has at most one."""

    slot_T: Tensor  # (T,) int64, the adapter of each token, -1 without one
    tokens_n: Tensor  # (n,) int64, tokens with an adapter, sorted by it
    # adapters of w_in (of a linear map: of its weight) and of w_out, one after another: (A * E, r, K), (A * E, N, r),
    # or (A, r, K), (A, N, r) if all experts share them
    on_in: LowRank | None = None
    on_out: LowRank | None = None

    @classmethod
    def of_slots(cls, slots: Sequence[int], device: torch.device) -> "TokenAdapters":
        """Slots of tokens, without matrices."""
        order = sorted((slot, token) for token, slot in enumerate(slots) if slot >= 0)
        both = torch.tensor([*slots, *(token for _, token in order)], dtype=torch.int64).to(device)
        return cls(both[: len(slots)], both[len(slots) :])


def stack_adapters(adapters: Sequence[LowRank | None]) -> LowRank | None:
    """Adapters of one matrix after another, with scaling 1, padded to the largest rank, with zeros in place of None;
    None for none."""
    known = [one for one in adapters if one is not None]
    assert all(one.scaling == 1 for one in known)
    if not known:
        return None
    rank = max(one.a_ErK.shape[1] for one in known)

    def padded(one: LowRank | None) -> tuple[Tensor, Tensor]:
        a, b, *_ = known[0] if one is None else one
        more = rank - a.shape[1]
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        return (a, b) if one is not None else (torch.zeros_like(a), torch.zeros_like(b))

    a, b = zip(*map(padded, adapters), strict=True)
    return LowRank(torch.cat(a), torch.cat(b), 1.0, known[0].is_shared)


class ExpertsCall(NamedTuple):
    """Inputs of the experts' operators: tokens, routing weights, expert weights and options.

    Attributes:
        x_TD: (T, D) tokens.
        weights_TK: (T, K) routing weights.
        experts: the experts' weights.
        backend: the caller's choice; in a checked call "torch", "triton" or "reference"; inside an operator the name in
            `BACKENDS`.
        ids_TK: (T, K) expert ids; None in a call with `maps`.
        maps: the order of the rows; None before it is computed, which some backends do not need.
        batch_invariant: whether a row's result must be bitwise the same in every batch.
        adapters: adapters of w_in and of w_out for all tokens; None: no adapters.
        of_tokens: adapters of single tokens, instead of `adapters`; for inference only.
    """

    x_TD: Tensor
    weights_TK: Tensor
    experts: ExpertWeights
    backend: str
    ids_TK: Tensor | None = None
    maps: RouteMetadata | None = None
    batch_invariant: bool = False
    adapters: tuple[LowRank | None, LowRank | None] | None = None
    of_tokens: TokenAdapters | None = None

    @property
    def has_adapters(self) -> bool:
        """Whether the experts' matrices have adapters."""
        return self.adapters is not None or self.of_tokens is not None

    @property
    def differentiable(self) -> list[Tensor]:
        """Tensors of the operator that may require gradients: x, routing weights, parameters."""
        return [self.x_TD, self.weights_TK, *self.experts.parameters]

    def flat(self) -> tuple[Any, ...]:
        """Flatten the call to the arguments of the library operators; the inverse of `make_experts_call`."""
        w, maps = self.experts, self.maps
        assert maps is not None
        order = [maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N, maps.row_of_slot_N]
        return (
            self.x_TD,
            self.weights_TK,
            list(w.w_in),
            list(w.w_out),
            list(w.b_in),
            [] if w.b_out is None else [w.b_out],
            [*w.scales_in, *w.scales_out],
            order,
            w.activation,
            w.format,
            self.backend,
            self.batch_invariant,
        )


FLAT = (
    "Tensor x_TD, Tensor weights_TK, Tensor[] w_in, Tensor[] w_out, Tensor[] b_in, Tensor[] b_out, Tensor[] scales, "
    "Tensor[] maps, str activation, str format, str backend, bool batch_invariant"
)
"""Schema of the arguments that `ExpertsCall.flat` returns."""

NUM_LISTS = 6
"""Number of tensor lists in `FLAT`."""


def make_experts_call(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_out: Sequence[Tensor],
    scales: Sequence[Tensor],
    maps: Sequence[Tensor],
    activation: str,
    format: str,
    backend: str,
    batch_invariant: bool,
) -> ExpertsCall:
    """Rebuild a call from the arguments of `ExpertsCall.flat`."""
    half = len(scales) // 2
    experts = ExpertWeights(
        tuple(w_in),
        tuple(w_out),
        activation,
        tuple(b_in),
        next(iter(b_out), None),
        format,
        tuple(scales[:half]),
        tuple(scales[half:]),
    )
    order = RouteMetadata(*maps)
    return ExpertsCall(x_TD, weights_TK, experts, backend, maps=order, batch_invariant=batch_invariant)


def forward(
    of_slice: Callable[..., tuple[Tensor, Tensor]], call: ExpertsCall, *, save_h: bool
) -> tuple[Tensor, list[Tensor]]:
    """Compute y (T, D) and H (R, G * F_i) of every slice; H has no rows unless save_h."""
    total, hidden = None, []
    for experts in call.experts.slices():
        y, h = of_slice(call.x_TD, experts, call.weights_TK, call.maps, save_h=save_h)
        total = _added(total, y)
        hidden.append(h)
    assert total is not None
    return total.to(call.x_TD.dtype), hidden


def backward(
    of_slice: Callable[..., tuple[Tensor | None, Tensor | None, ExpertSlice]],  # a backend's backward for one slice
    call: ExpertsCall,
    grad_TD: Tensor,  # the gradient of y, contiguous
    hidden: Sequence[Tensor],  # H of every slice, from `forward`
    needs: Sequence[bool],  # for each tensor of `differentiable`, whether it needs a gradient
    main: Sequence[Tensor] = (),  # buffers in the order of the parameters, or empty
) -> list[Tensor | None]:
    """Compute the needed gradients of `differentiable`; parameter gradients are added to `main` if given."""
    d_x, d_weights, grads = None, None, []
    for h, (step, into) in zip(hidden, _steps(call, needs, main), strict=True):
        part_x, part_weights, part = of_slice(grad_TD, call.x_TD, h, *step, into=into)
        d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
        grads.append(part)
    return [_typed(d_x, call.x_TD), _typed(d_weights, call.weights_TK), *_flat(call, grads)]


def data_grads(
    of_slice: Callable[..., tuple[Tensor | None, Tensor | None, HiddenGradients]],
    call: ExpertsCall,
    grad_TD: Tensor,
    hidden: Sequence[Tensor],
) -> tuple[Tensor | None, Tensor | None, tuple[HiddenGradients, ...]]:
    """Compute the gradients of x and of the routing weights, and the inputs of `weight_grads` for every slice."""
    d_x, d_weights, kept = None, None, []
    for h, (step, _) in zip(hidden, _steps(call, [True] * len(call.differentiable), ()), strict=True):
        part_x, part_weights, rows = of_slice(grad_TD, call.x_TD, h, *step)
        d_x, d_weights = _added(d_x, part_x), _added(d_weights, part_weights)
        kept.append(rows)
    return _typed(d_x, call.x_TD), _typed(d_weights, call.weights_TK), tuple(kept)


def weight_grads(
    of_slice: Callable[..., ExpertSlice],
    call: ExpertsCall,
    grad_TD: Tensor,
    kept: Sequence[HiddenGradients],
    main: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Compute the gradients of the parameters, or add them to `main`."""
    steps = _steps(call, [True] * len(call.differentiable), main)
    return _flat(
        call,
        [of_slice(grad_TD, call.x_TD, rows, *step, into=into) for rows, (step, into) in zip(kept, steps, strict=True)],
    )


def _by_slice(experts: ExpertWeights, values: Sequence[Any], missing: Any) -> Iterator[tuple[Any, ...]]:
    """Group values in the order of the parameters by slice: (w_in, w_out, b_in, b_out) each."""
    n = len(experts.w_in)
    after = 2 * n + len(experts.b_in)
    b_in, b_out, others = values[2 * n : after], values[after:], [missing] * n
    return zip(values[:n], values[n : 2 * n], b_in or others, [*b_out, *others][:n], strict=True)


def _steps(
    call: ExpertsCall, needs: Sequence[bool], main: Sequence[Tensor]
) -> list[tuple[tuple[Any, ...], ExpertSlice | None]]:
    """Trailing arguments of the backward functions for every slice, and the buffers to add its gradients to."""
    x, weights, *rest = needs
    experts = call.experts
    into: list[ExpertSlice | None] = [None] * len(experts.w_in)
    if main:
        into = [
            ExpertSlice(w_in, w_out, b_in, b_out, experts.activation)
            for w_in, w_out, b_in, b_out in _by_slice(experts, main, None)
        ]
    return [
        ((one, call.weights_TK, call.maps, Needs(x, w_in, w_out, weights, b_in, b_out)), to)
        for one, (w_in, w_out, b_in, b_out), to in zip(
            experts.slices(), _by_slice(experts, rest, False), into, strict=True
        )
    ]


def _flat(call: ExpertsCall, grads: Sequence[ExpertSlice]) -> list[Tensor | None]:
    experts = call.experts
    b_in = [None if g.b_in_EGF is None else g.b_in_EGF.contiguous() for g in grads]
    weights = [g.w_in_EGFD for g in grads] + [g.w_out_EDF for g in grads]
    b_out = [] if experts.b_out is None else [grads[0].b_out_ED]
    return [*weights, *b_in[: len(experts.b_in)], *b_out]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Running sum: the first part as it is, in the accumulation dtype from the second on."""
    if total is None or part is None:
        return part if total is None else total
    return total.to(accumulate_dtype(total.dtype)).add_(part)


def _typed(total: Tensor | None, like: Tensor) -> Tensor | None:
    return None if total is None else total.to(like.dtype)
