"""The way out and back: from this process's tokens to the experts' rows and their partial sums home again.

The layer knows only the protocol: it starts tokens on their way, computes what concerns its own tokens meanwhile, and
finishes with the experts. Expert parallelism swaps the dispatcher; on one process nothing moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.config.renamed import with_current_names
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertParameters
from expertmesh.moe.layer_call import LayerCall
from expertmesh.moe.phases import phase
from expertmesh.moe.types import Routing


@dataclass(frozen=True)
class Dispatched:
    """Tokens and their choices, as a process sends them or as its experts see them; of tokens that stay, their `RoundTrip`, too.

    Attributes:
        x_TD: tokens, in the dtype of the layer's input.
        expert_ids_TK: (T, K) expert ids in [0, E], global where they are sent and local where they arrive; E (the number
            of experts, or of local ones) means "no expert".
        weights_TK: (T, K) routing weights of these slots.
        max_rows: a bound on the live slots that the host knows, or None.
        capacity_factor: about so many times the mean are the most rows of an expert; None: no limit. The same on all processes.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    max_rows: int | None = None
    capacity_factor: float | None = None

    @staticmethod
    def of(call: LayerCall, routing: Routing) -> "Dispatched":
        """This process's tokens, with what is left of their choices."""
        weights_TK = routing.weights_TK
        assert weights_TK is not None
        return Dispatched(
            call.x_TD, routing.expert_ids_TK, weights_TK, routing.max_rows, call.capacity_factor
        )

    def advance(self) -> None:
        """Nothing is under way."""

    def finish(self, experts: "Experts") -> Tensor:
        """Run the experts."""
        return apply_experts(experts, self)


class Experts(Protocol):
    """What computes on tokens: `GroupedExperts`, `ExpertList`."""

    def __call__(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None,
        parameters: ExpertParameters | None,
    ) -> Tensor:
        """(T, D) sums over each token's local experts; parameters: None for the experts' own."""


def apply_experts(
    experts: Experts, tokens: Dispatched, parameters: ExpertParameters | None = None
) -> Tensor:
    """Run experts on tokens that have arrived.

    Args:
        experts: the experts of this process.
        tokens: the tokens, with local expert ids.
        parameters: the parameters that the experts compute with; None: their own.

    Returns:
        (T, D) one partial sum per token.
    """
    with phase("experts"):
        return experts(
            tokens.x_TD,
            tokens.expert_ids_TK,
            tokens.weights_TK,
            max_rows=tokens.max_rows,
            parameters=parameters,
        )


class RoundTrip(Protocol):
    """Tokens between their start and the return of their sums."""

    def advance(self) -> None:
        """Send what `start` could not, because other processes had to say how much to expect; may be left out."""

    def finish(self, experts: Experts) -> Tensor:
        """Wait for tokens, run the experts on them, and bring the sums home.

        Args:
            experts: the experts of this process, called on what arrives, perhaps in several parts.

        Returns:
            (T, D) for the tokens that set out.
        """


class TokenDispatcher(Protocol):
    """Sends tokens to the processes that hold their experts, and partial sums back.

    Every process that shares the experts must call, with any number of tokens, none included.
    """

    def start(self, tokens: Dispatched, way: DispatchOptions = AS_USUAL) -> RoundTrip:
        """Send tokens out; what the caller computes before `finish` hides their travel, in the backward too.

        Args:
            tokens: the tokens of this process, with global expert ids.
            way: how they travel in this call.

        Raises:
            ConfigError: the dispatcher has no such way.
        """

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum a tensor over all processes that work on the batch; differentiable once, for a sum of their losses."""


_AT_HOME = {
    "route_degree": (None, 1),
    "overlap_degree": (None, 1),
    "all_to_all": (None, "flat", "auto"),
    "replicated_experts": (None, 0),
}
"""Values that ask nothing of one process."""


def check_at_home(way: DispatchOptions) -> None:
    """Raise ConfigError unless a way of the tokens asks nothing of a layer on one process."""
    _check_options(way)
    for name in (field.name for field in fields(way)):
        value = getattr(way, name)
        # no `in`, which compares tensors with what is there
        if not any(
            value is one or (type(value) is type(one) and value == one) for one in _AT_HOME[name]
        ):
            raise ConfigError(
                f"{name}={value!r}: this layer is on one process; leave it out, or spread the layer with expertmesh.parallel"
            )


def _check_options(way: Any) -> DispatchOptions:
    """Raise ConfigError unless these are the options of a call."""
    if not isinstance(way, DispatchOptions):
        raise ConfigError(
            f"dispatch={way!r}: must be a DispatchOptions; give em.DispatchOptions(route_degree=...)"
        )
    return way


def dispatch_options(given: DispatchOptions | None, choices: Mapping[str, Any]) -> DispatchOptions:
    """How tokens travel in a call: the options, or the choices one by one.

    Raises:
        ConfigError: there are both.
        TypeError: there is no such choice.
    """
    if not choices:
        return AS_USUAL if given is None else _check_options(given)
    if given is not None:
        raise ConfigError(
            f"dispatch= and {', '.join(choices)}=: both say how tokens travel; give dispatch= alone"
        )
    choices = with_current_names(choices)
    unknown = [name for name in choices if name not in _AT_HOME]
    if unknown:
        raise TypeError(f"MoELayer.forward() got an unexpected keyword argument {unknown[0]!r}")
    return DispatchOptions(**choices)


class LocalDispatcher:
    """All experts are here: nothing moves. Never synchronises."""

    def start(self, tokens: Dispatched, way: DispatchOptions = AS_USUAL) -> RoundTrip:
        """Keep the tokens."""
        check_at_home(way)
        return tokens

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Return the value as it is."""
        return value
