"""Autotuner of dispatch options: the cost model names candidates, and measured steps decide among them.

A tuner depends only on the numbers that it is told, in their order: ranks that report equal numbers choose alike. Loads
are sorted into buckets, and each bucket is measured once, with a bounded number of steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from expertmesh.config.dispatch_options import AllToAll, DispatchOptions
from expertmesh.costs.communication import RouteShape, TokenLoad
from expertmesh.costs.layer_time import LayerShape, Machine, extra_bytes, step_time

OVERLAP_DEGREES = (1, 2, 4, 8)
TOO_SLOW = 1.5
"""Options that take more than this times the fastest time are not measured again."""
CLOSE = 1.15
"""Options within this factor of the fastest time are measured again before one is settled on."""
TIE = 1.03
"""Among options within this factor of the fastest time, the simplest is settled on."""
PATIENCE = 64
"""Calls without a report after which open trials count as lost (forwards without a backward); the limit then
doubles."""
HOPELESS = 5.0
"""Options for which the cost model predicts more than this times the fastest time are not measured."""
HOT = 1.5
"""Ratio to the mean number of rows from which experts are worth replicating."""


@dataclass(frozen=True)
class Bucket:
    """Class of similar loads."""

    trains: bool  # whether there is a backward
    top_k: int
    tokens: int  # tokens of a rank, in half octaves
    fullness: int  # rows of the fullest rank / mean, in half octaves
    capacity_factor: float | None = None  # capacity factor of the calls; None: dropless

    @staticmethod
    def of(load: TokenLoad, *, num_ranks: int, trains: bool, capacity_factor: float | None = None) -> "Bucket":
        """Bucket of a load on the ranks that hold the experts."""
        E = len(load.shares)
        blocks = load.block_shares(num_ranks) if E % num_ranks == 0 else list(load.shares)
        fullness = max(blocks) * len(blocks)
        return Bucket(
            trains,
            load.top_k,
            _half_octaves(load.num_tokens),
            _half_octaves(max(fullness, 1.0)),
            capacity_factor,
        )

    @property
    def key(self) -> str:
        """Text key of the bucket."""
        mode = "train" if self.trains else "infer"
        capacity = "" if self.capacity_factor is None else f"-C{self.capacity_factor:g}"
        return f"{mode}-K{self.top_k}-T{self.tokens}-F{self.fullness}{capacity}"


def _half_octaves(value: float) -> int:
    return round(2 * math.log2(max(value, 1.0)))


@dataclass(frozen=True)
class Choices:
    """Dispatch options that a layer may choose from."""

    routes: Mapping[int, RouteShape]  # route shape of each allowed route_degree
    overlap_degrees: Sequence[int]  # allowed numbers of parts
    kinds: Sequence[AllToAll]  # allowed all-to-alls, "flat" before "hierarchical"
    replicated: Sequence[int]  # allowed numbers of replicated experts
    usual: DispatchOptions  # default options
    budget_bytes: float  # memory that options may need beside the shards

    def ways(self, load: TokenLoad) -> list[DispatchOptions]:
        """All options that differ in effect under a load."""
        mean = 1 / len(load.shares)
        replicated = [h for h in self.replicated if h == 0 or max(load.shares) >= HOT * mean]
        found = []
        for r, route in self.routes.items():
            if r == 1:
                found.append(DispatchOptions(1, 1, "flat", 0))
                continue
            found += [
                DispatchOptions(r, n, kind, h)
                for n in self.overlap_degrees
                for kind in self._kinds(route)
                for h in replicated or [self.replicated[0]]
            ]
        return found

    def allow(self, dispatch: DispatchOptions) -> bool:
        """Whether options found elsewhere are among `ways` for some load."""
        route = self.routes.get(dispatch.route_degree or 1)
        if route is None or route.route_degree == 1:
            return route is not None and dispatch == DispatchOptions(1, 1, "flat", 0)
        return (
            dispatch.overlap_degree in self.overlap_degrees
            and dispatch.all_to_all in self._kinds(route)
            and dispatch.replicated_experts in self.replicated
        )

    def _kinds(self, route: RouteShape) -> Sequence[AllToAll]:
        return [k for k in self.kinds if k == "flat" or route.has_two_levels] or ["flat"]


@dataclass(frozen=True)
class Effort:
    """Measuring budget of a bucket."""

    num_starts: int = 6  # number of candidates from the cost model
    num_ways: int = 14  # maximum number of candidates, including those found near the fastest
    # counted trials per candidate, after a first one in which groups connect; close candidates get twice as many
    num_trials: int = 3


@dataclass(frozen=True)
class ModelSearch:
    """Candidates that are worth measuring by the cost model.

    Candidates fit in memory and are not `HOPELESS`; the default options may be. If none fits, the default options are
    the only candidate.
    """

    choices: Choices  # allowed options
    layer: LayerShape  # shape of a layer in training
    machine: Machine  # speeds of the machine

    def starts(self, load: TokenLoad, trains: bool, number: int) -> list[DispatchOptions]:
        """First candidates, sorted by predicted time: at most `number`, at least one; each route_degree is covered
        first, then each all-to-all and number of replicated experts."""
        ranked = self._ranked(load, trains)
        if not ranked:
            return [self.choices.usual]
        routes: dict[int | None, DispatchOptions] = {}
        kinds: dict[tuple[object, ...], DispatchOptions] = {}
        for dispatch in ranked:
            routes.setdefault(dispatch.route_degree, dispatch)
            kinds.setdefault((dispatch.route_degree, dispatch.all_to_all, dispatch.replicated_experts), dispatch)
        usual = [dispatch for dispatch in self._fitting(load, trains) if dispatch == self.choices.usual]
        wanted = dict.fromkeys([ranked[0], *routes.values(), *usual, *kinds.values(), *ranked])
        return sorted(list(wanted)[:number], key=lambda dispatch: self._seconds(dispatch, load, trains))

    def near(self, dispatch: DispatchOptions, load: TokenLoad, trains: bool) -> list[DispatchOptions]:
        """Candidates one step away in number of parts, all-to-all or replicated experts, sorted by predicted time."""
        return [other for other in self._ranked(load, trains) if self._is_near(dispatch, other)]

    def _is_near(self, one: DispatchOptions, other: DispatchOptions) -> bool:
        if one == other or one.route_degree != other.route_degree:
            return False  # options of different route_degree are not neighbours
        degrees = self.choices.overlap_degrees
        steps = (
            abs(degrees.index(one.overlap_degree or 1) - degrees.index(other.overlap_degree or 1)),
            int(one.all_to_all != other.all_to_all),
            abs((one.replicated_experts or 0) - (other.replicated_experts or 0)),
        )
        return sum(steps) == 1

    def _ranked(self, load: TokenLoad, trains: bool) -> list[DispatchOptions]:
        seconds = {w: self._seconds(w, load, trains) for w in self._fitting(load, trains)}
        limit = HOPELESS * min(seconds.values(), default=0.0)
        return sorted((w for w in seconds if seconds[w] <= limit), key=seconds.__getitem__)

    def _fitting(self, load: TokenLoad, trains: bool) -> list[DispatchOptions]:
        return [dispatch for dispatch in self.choices.ways(load) if self.fits(dispatch, load, trains)]

    def _seconds(self, dispatch: DispatchOptions, load: TokenLoad, trains: bool) -> float:
        return step_time(dispatch, self._route(dispatch), self._layer(trains), load, self.machine).total_s

    def fits(self, dispatch: DispatchOptions, load: TokenLoad, trains: bool) -> bool:
        """Whether the memory of the options is within the budget."""
        needed = extra_bytes(dispatch, self._route(dispatch), self._layer(trains), load)
        return needed <= self.choices.budget_bytes

    def _route(self, dispatch: DispatchOptions) -> RouteShape:
        return self.choices.routes[dispatch.route_degree or 1]

    def _layer(self, trains: bool) -> LayerShape:
        return self.layer if trains else replace(self.layer, trains=False, num_gathers=1)


class _Bucket:
    """Trials of one bucket: the first candidates, then neighbours of the fastest, then the close ones again."""

    def __init__(
        self,
        starts: list[DispatchOptions],
        near: Callable[[DispatchOptions], list[DispatchOptions]],
        effort: Effort,
    ) -> None:
        self._near, self._effort = near, effort
        self.times: dict[DispatchOptions, list[float]] = {}
        self._wanted: dict[DispatchOptions, int] = {}
        self._issued: dict[DispatchOptions, int] = {}
        self._calls_without_news, self._patience = 0, PATIENCE
        self.settled: DispatchOptions | None = None
        self._add(starts)
        if len(starts) == 1:
            self.settled = starts[0]

    @property
    def best(self) -> DispatchOptions:
        """Candidate with the least median time; before any trial, the first candidate."""
        return min(self._left(), key=self._median)

    def report(self, dispatch: DispatchOptions, seconds: float) -> None:
        """Record the time of a trial, and extend the candidates or settle."""
        self.times[dispatch].append(seconds)
        self._calls_without_news, self._patience = 0, PATIENCE
        left = self._left()
        if all(len(self.times[dispatch]) >= self._wanted[dispatch] for dispatch in left):
            self._go_on(left)

    def _go_on(self, left: list[DispatchOptions]) -> None:
        best, most = self.best, 1 + 2 * self._effort.num_trials
        room = self._effort.num_ways - len(self.times)
        new = [dispatch for dispatch in self._near(best) if dispatch not in self.times][:room]
        close = [dispatch for dispatch in left if self._median(dispatch) <= CLOSE * self._median(best)]
        if new:
            self._add(new)
        elif len(close) > 1 and any(self._wanted[dispatch] < most for dispatch in close):
            self._wanted |= dict.fromkeys(close, most)
        else:
            ties = [dispatch for dispatch in close if self._median(dispatch) <= TIE * self._median(best)]
            self.settled = min(ties, key=lambda dispatch: (*_simplicity(dispatch), self._median(dispatch)))

    def _add(self, ways: list[DispatchOptions]) -> None:
        self.times |= {dispatch: [] for dispatch in ways}
        self._issued |= dict.fromkeys(ways, 0)
        self._wanted |= dict.fromkeys(ways, 1 + self._effort.num_trials)

    def _median(self, dispatch: DispatchOptions) -> float:
        return median(self.times[dispatch][1:] or [float("inf")])

    def _left(self) -> list[DispatchOptions]:
        """Candidates that no measurement has excluded as too slow."""
        seen = {dispatch: min(times[1:]) for dispatch, times in self.times.items() if len(times) > 1}
        limit = TOO_SLOW * min(seen.values(), default=0.0)
        return [dispatch for dispatch in self.times if seen.get(dispatch, 0.0) <= limit]

    def next_trial(self) -> DispatchOptions | None:
        """Next candidate to measure, round-robin; None: all trials are under way."""
        self._calls_without_news += 1
        if self._calls_without_news > self._patience:
            self._calls_without_news, self._patience = 0, 2 * self._patience
            self._issued = {dispatch: len(times) for dispatch, times in self.times.items()}
        open_ = [dispatch for dispatch in self._left() if self._issued[dispatch] < self._wanted[dispatch]]
        if not open_:
            return None
        dispatch = min(open_, key=self._issued.__getitem__)
        self._issued[dispatch] += 1
        return dispatch


def _simplicity(dispatch: DispatchOptions) -> tuple[object, ...]:
    """Sort key: fewer parts, fewer replicated experts and flat first."""
    return dispatch.overlap_degree, dispatch.replicated_experts, dispatch.all_to_all != "flat"


@dataclass(frozen=True)
class Trial:
    """Call whose time is measured."""

    bucket: str  # key of its bucket
    dispatch: DispatchOptions


class Tuner:
    """Chooses dispatch options for all layers of one shape."""

    def __init__(
        self,
        search: ModelSearch,  # names candidates
        *,
        known: Mapping[str, DispatchOptions] | None = None,  # settled options by bucket
        on_settled: Callable[[Mapping[str, DispatchOptions]], None] | None = None,
        effort: Effort | None = None,  # measuring budget of a bucket
    ) -> None:
        self._search, self._on_settled, self._effort = search, on_settled, effort or Effort()
        self.settled: dict[str, DispatchOptions] = dict(known or {})
        self._unchecked = set(self.settled)
        self._buckets: dict[str, _Bucket] = {}

    def choose(self, load: TokenLoad, bucket: Bucket) -> tuple[DispatchOptions, Trial | None]:
        """Options of a call, and its trial; None: its time is not needed."""
        key = bucket.key
        if key in self._unchecked:
            self._unchecked.remove(key)
            if not self._search.fits(self.settled[key], load, bucket.trains):
                del self.settled[key]  # it was found with more free memory
        if key not in self.settled and key not in self._buckets:
            starts = self._search.starts(load, bucket.trains, self._effort.num_starts)
            near = partial(self._search.near, load=load, trains=bucket.trains)
            self._buckets[key] = _Bucket(starts, near, self._effort)
            self._settle(key)
        if key in self.settled:
            return self.settled[key], None
        trials = self._buckets[key]
        dispatch = trials.next_trial()
        return (trials.best, None) if dispatch is None else (dispatch, Trial(key, dispatch))

    def report(self, trial: Trial, seconds: float) -> None:
        """Record the time of a trial, over all ranks."""
        if trial.bucket in self._buckets and trial.bucket not in self.settled:
            self._buckets[trial.bucket].report(trial.dispatch, seconds)
            self._settle(trial.bucket)

    def _settle(self, key: str) -> None:
        dispatch = self._buckets[key].settled
        if dispatch is not None:
            self.settled[key] = dispatch
            if self._on_settled is not None:
                self._on_settled(self.settled)
