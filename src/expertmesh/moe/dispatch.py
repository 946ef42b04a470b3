"""Dispatch and combine: tokens go to their experts' processes, and partial sums come back.

The layer knows the protocol only: it starts the dispatch, computes its dense blocks meanwhile, and finishes with the
experts. Expert parallelism swaps the dispatcher; on one process nothing moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.config.renamed import with_current_names
from expertmesh.config.values import check_type
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertParameters
from expertmesh.moe.layer_call import LayerCall
from expertmesh.moe.phases import phase
from expertmesh.moe.types import Routing


@dataclass(frozen=True)
class Dispatched:
    """Tokens with expert ids and routing weights, as they are sent or as they arrive. For tokens that stay on their
    process it is their `RoundTrip` too.

    Attributes:
        x_TD: tokens, in the dtype of the layer's input.
        expert_ids_TK: (T, K) expert ids in [0, E], global where they are sent and local where they arrive; E (the
            number of experts, or of local ones) means "no expert".
        weights_TK: (T, K) routing weights of these slots.
        max_rows: upper bound on the number of live slots, known on the host; or None.
        capacity_factor: approximate upper bound on an expert's rows, as a multiple of the mean; None: no bound. Equal
            on all processes.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    max_rows: int | None = None
    capacity_factor: float | None = None

    @staticmethod
    def of(call: LayerCall, routing: Routing) -> "Dispatched":
        """Pair this process's tokens with the choices that the capacity kept."""
        weights_TK = routing.weights_TK
        assert weights_TK is not None
        return Dispatched(call.x_TD, routing.expert_ids_TK, weights_TK, routing.max_rows, call.capacity_factor)

    def advance(self) -> None:
        """Do nothing: no token is in flight."""

    def finish(self, experts: "Experts") -> Tensor:
        """Run the experts."""
        return apply_experts(experts, self)


class Experts(Protocol):
    """Protocol of a module that computes the experts: `GroupedExperts`, `ExpertList`, ..."""

    def __call__(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None,
        parameters: ExpertParameters | None,
    ) -> Tensor:
        """Compute (T, D) weighted sums over each token's local experts. `parameters` replaces the module's own if not
        None."""


def apply_experts(experts: Experts, tokens: Dispatched, parameters: ExpertParameters | None = None) -> Tensor:
    """Run experts on tokens that have arrived, with local expert ids: (T, D), one partial sum per token."""
    with phase("experts"):
        return experts(
            tokens.x_TD,
            tokens.expert_ids_TK,
            tokens.weights_TK,
            max_rows=tokens.max_rows,
            parameters=parameters,
        )


class RoundTrip(Protocol):
    """Dispatch and combine in flight, from `start` until the sums have returned."""

    def advance(self) -> None:
        """Send the tokens that `start` had to hold back until row counts of other processes arrived. Optional to
        call."""

    def finish(self, experts: Experts) -> Tensor:
        """Wait for arriving tokens, run the experts on them, and return the sums to the tokens' processes.

        Args:
            experts: the experts of this process, called on the arriving tokens, perhaps in several parts.

        Returns:
            (T, D) sums for the tokens that this process sent.
        """


class TokenDispatcher(Protocol):
    """Protocol: sends tokens to the processes that hold their experts, and partial sums back.

    Every process that shares the experts must call it, with any number of tokens, 0 included.
    """

    def start(self, tokens: Dispatched, dispatch: DispatchOptions = AS_USUAL) -> RoundTrip:
        """Start the dispatch. Computation of the caller before `finish` overlaps with it, in the backward too."""

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum a tensor over all processes that work on the batch; differentiable once, for a sum of their losses."""


_AT_HOME = {
    "route_degree": (None, 1),
    "overlap_degree": (None, 1),
    "all_to_all": (None, "flat", "auto"),
    "replicated_experts": (None, 0),
}
"""Values of dispatch options that one process accepts, because they ask for no other process."""


def check_at_home(dispatch: DispatchOptions) -> None:
    """Raise ConfigError if dispatch options ask a layer on one process for more than one."""
    _check_options(dispatch)
    for name in (field.name for field in fields(dispatch)):
        value = getattr(dispatch, name)
        # not `in`, which would compare a tensor element by element
        if not any(value is one or (type(value) is type(one) and value == one) for one in _AT_HOME[name]):
            raise ConfigError(
                f"{name}={value!r}: this layer is on one process; leave it out, or spread the layer with "
                "expertmesh.parallel"
            )


def _check_options(dispatch: Any) -> DispatchOptions:
    """Raise ConfigError unless these are the options of a call."""
    fix = "give em.DispatchOptions(route_degree=...)"
    check_type("dispatch", dispatch, DispatchOptions, "a DispatchOptions", fix)
    result: DispatchOptions = dispatch
    return result


def dispatch_options(given: DispatchOptions | None, choices: Mapping[str, Any]) -> DispatchOptions:
    """Dispatch options of a call, given as `dispatch=` or as single keywords."""
    if not choices:
        return AS_USUAL if given is None else _check_options(given)
    if given is not None:
        raise ConfigError(f"dispatch= and {', '.join(choices)}=: both set the dispatch of tokens; give dispatch= alone")
    choices = with_current_names(choices)
    unknown = [name for name in choices if name not in _AT_HOME]
    if unknown:
        raise TypeError(f"MoELayer.forward() got an unexpected keyword argument {unknown[0]!r}")
    return DispatchOptions(**choices)


class LocalDispatcher:
    """Dispatcher of one process that holds all experts: nothing moves. Never synchronises."""

    def start(self, tokens: Dispatched, dispatch: DispatchOptions = AS_USUAL) -> RoundTrip:
        """Return the tokens themselves as the round trip."""
        check_at_home(dispatch)
        return tokens

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Return the value as it is."""
        return value
