"""The arguments of the experts' operators, and one pass over the slices of their weights.

y = act(x W_in^T) W_out^T is a sum over the hidden units, so slices of F are experts of their own whose results add
up. Nothing is concatenated: gathered shards are used where they lie. Results of the slices, (T, D) each, are added in
FP32 (FP64 for FP64) in the order of the slices.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
    """What an adapter adds to every expert's matrix W: scaling * B A.

    Attributes:
        a_ErK: (E, r, K), or (1, r, K) where all experts share it.
        b_ENr: (E, N, r), or (1, N, r).
        scaling: s.
        is_shared: whether all experts share it.
    """

    a_ErK: Tensor
    b_ENr: Tensor
    scaling: float
    is_shared: bool


class AdapterRun(NamedTuple):
    """Tokens one after the other whose experts have an adapter that others have not.

    Attributes:
        first: the first of them.
        stop: the one behind the last.
        on_in: what is added to w_in, for each expert; None: nothing.
        on_out: what is added to w_out.
    """

    first: int
    stop: int
    on_in: LowRank | None
    on_out: LowRank | None


class ExpertsCall(NamedTuple):
    """What the experts compute: tokens and their routing weights beside the experts' weights.

    Attributes:
        x_TD: (T, D) tokens.
        weights_TK: (T, K) routing weights.
        experts: the experts' weights.
        backend: as the caller asked for it; once checked the library that was found, and inside an operator the name in `BACKENDS`.
        ids_TK: (T, K) slots of the experts, until there are `maps`.
        maps: the order of the rows; None: a backend that needs none is still looked for.
        batch_invariant: whether a row's result has to be the same to the bit in every batch.
        adapters: what is added to w_in and to w_out for all tokens; None: no adapters at all.
        runs: tokens that have adapters of their own, in their order, in the place of `adapters`; for inference alone.
    """

    x_TD: Tensor
    weights_TK: Tensor
    experts: ExpertWeights
    backend: str
    ids_TK: Tensor | None = None
    maps: RouteMetadata | None = None
    batch_invariant: bool = False
    adapters: tuple[LowRank | None, LowRank | None] | None = None
    runs: tuple[AdapterRun, ...] = ()

    @property
    def has_adapters(self) -> bool:
        """Whether anything is added to the experts' matrices."""
        return self.adapters is not None or bool(self.runs)

    @property
    def differentiable(self) -> list[Tensor]:
        """All tensors of an operator that may want a gradient."""
        return [self.x_TD, self.weights_TK, *self.experts.parameters]

    def flat(self) -> tuple[Any, ...]:
        """The call as operators of a library take it; the inverse of `make_experts_call`."""
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
        )


FLAT = (
    "Tensor x_TD, Tensor weights_TK, Tensor[] w_in, Tensor[] w_out, Tensor[] b_in, Tensor[] b_out, Tensor[] scales, "
    "Tensor[] maps, str activation, str format, str backend"
)
"""Schema of what `ExpertsCall.flat` gives."""

NUM_LISTS = 6
"""Lists of tensors in `FLAT`."""


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
) -> ExpertsCall:
    """The call that `ExpertsCall.flat` made these of."""
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
    return ExpertsCall(x_TD, weights_TK, experts, backend, maps=RouteMetadata(*maps))


def forward(
    of_slice: Callable[..., tuple[Tensor, Tensor]], call: ExpertsCall, *, save_h: bool
) -> tuple[Tensor, list[Tensor]]:
    """Give y (T, D) and H (R, G * F_i) of every slice, without rows unless save_h.

    Args:
        of_slice: a backend's forward for one slice.
        call: the call.
        save_h: whether H is wanted.
    """
    total, hidden = None, []
    for experts in call.experts.slices():
        y, h = of_slice(call.x_TD, experts, call.weights_TK, call.maps, save_h=save_h)
        total = _added(total, y)
        hidden.append(h)
    assert total is not None
    return total.to(call.x_TD.dtype), hidden


def backward(
    of_slice: Callable[..., tuple[Tensor | None, Tensor | None, ExpertSlice]],
    call: ExpertsCall,
    grad_TD: Tensor,
    hidden: Sequence[Tensor],
    needs: Sequence[bool],
    main: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Give the gradients of `differentiable`, as far as needed, or add those of the parameters to `main`.

    Args:
        of_slice: a backend's backward for one slice.
        call: the call.
        grad_TD: the gradient of y, contiguous.
        hidden: as `forward` gave them.
        needs: which of `differentiable` want a gradient.
        main: buffers in the order of the parameters, or none.
    """
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
    """Give the gradients of x and of the routing weights, and what `weight_grads` needs of every slice."""
    d_x, d_weights, kept = None, None, []
    for h, (step, _) in zip(
        hidden, _steps(call, [True] * len(call.differentiable), ()), strict=True
    ):
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
    """Give the gradients of the parameters, or add them to `main`."""
    steps = _steps(call, [True] * len(call.differentiable), main)
    return _flat(
        call,
        [
            of_slice(grad_TD, call.x_TD, rows, *step, into=into)
            for rows, (step, into) in zip(kept, steps, strict=True)
        ],
    )


def _by_slice(
    experts: ExpertWeights, values: Sequence[Any], missing: Any
) -> Iterator[tuple[Any, ...]]:
    """Values in the order of the parameters -> (w_in, w_out, b_in, b_out) of every slice."""
    n = len(experts.w_in)
    after = 2 * n + len(experts.b_in)
    b_in, b_out, others = values[2 * n : after], values[after:], [missing] * n
    return zip(values[:n], values[n : 2 * n], b_in or others, [*b_out, *others][:n], strict=True)


def _steps(
    call: ExpertsCall, needs: Sequence[bool], main: Sequence[Tensor]
) -> list[tuple[tuple[Any, ...], ExpertSlice | None]]:
    """Of every slice what all functions of a backward are given last, and the buffers to add to."""
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
    """The sum so far: the first part as it is, of wide type from the second on."""
    if total is None or part is None:
        return part if total is None else total
    return total.to(accumulate_dtype(total.dtype)).add_(part)


def _typed(total: Tensor | None, like: Tensor) -> Tensor | None:
    return None if total is None else total.to(like.dtype)
