"""Which way is the fastest for a load: the cost model names a few, measured steps decide among them.

A tuner is a pure function of what it is told, in that order: ranks that tell theirs the same numbers choose alike. Loads
are sorted into buckets, and each bucket is tried out once, with a bounded number of steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from expertmesh.config.way import AllToAll, Way
from expertmesh.costs.communication import RouteShape, TokenLoad
from expertmesh.costs.layer_time import LayerShape, Machine, extra_bytes, step_time

OVERLAP_DEGREES = (1, 2, 4, 8)
NUM_FINALISTS = 6
NUM_TRIALS = 3
TOO_SLOW = 2.0
"""A way that took so many times the fastest's time is not measured again."""
HOPELESS = 5.0
"""A way for which the model says so many times the fastest's time is not measured at all."""
HOT = 1.5
"""Experts with this times the mean rows are worth a shadow."""


@dataclass(frozen=True)
class Bucket:
    """Loads that are alike.

    Attributes:
        trains: whether there is a backward.
        top_k: K.
        tokens: of a rank, in half octaves.
        fullness: rows of the fullest rank over the mean, in half octaves.
        capacity_factor: of the calls; None: nothing is dropped.
    """

    trains: bool
    top_k: int
    tokens: int
    fullness: int
    capacity_factor: float | None = None

    @staticmethod
    def of(
        load: TokenLoad, *, num_ranks: int, trains: bool, capacity_factor: float | None = None
    ) -> "Bucket":
        """The bucket of a load on so many ranks that hold the experts."""
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
        """As text."""
        mode = "train" if self.trains else "infer"
        capacity = "" if self.capacity_factor is None else f"-C{self.capacity_factor:g}"
        return f"{mode}-K{self.top_k}-T{self.tokens}-F{self.fullness}{capacity}"


def _half_octaves(value: float) -> int:
    return round(2 * math.log2(max(value, 1.0)))


@dataclass(frozen=True)
class Choices:
    """What a layer may choose from.

    Attributes:
        routes: the ranks of each route_degree that is allowed.
        overlap_degrees: numbers of parts that are allowed.
        kinds: all-to-alls that are allowed, "flat" before "hierarchical".
        shadows: numbers of hot experts that are allowed.
        usual: what runs without a choice.
        budget_bytes: memory that a way may need beside the shards.
    """

    routes: Mapping[int, RouteShape]
    overlap_degrees: Sequence[int]
    kinds: Sequence[AllToAll]
    shadows: Sequence[int]
    usual: Way
    budget_bytes: float

    def ways(self, load: TokenLoad) -> list[Way]:
        """All that make a difference under a load."""
        mean = 1 / len(load.shares)
        shadows = [h for h in self.shadows if h == 0 or max(load.shares) >= HOT * mean]
        found = []
        for r, route in self.routes.items():
            if r == 1:
                found.append(Way(1, 1, "flat", 0))
                continue
            kinds = [k for k in self.kinds if k == "flat" or route.has_two_levels]
            found += [
                Way(r, n, kind, h)
                for n in self.overlap_degrees
                for kind in kinds or ["flat"]
                for h in shadows or [self.shadows[0]]
            ]
        return found


def finalists(
    choices: Choices, layer: LayerShape, load: TokenLoad, machine: Machine, *, number: int
) -> list[Way]:
    """The ways to measure, the best of the model first: the best of each route_degree, the usual one, and the next best.

    None that does not fit memory, unless nothing does: then the usual one. None that is hopeless, but for the usual one.
    """

    def seconds(way: Way) -> float:
        route = choices.routes[way.route_degree or 1]
        return step_time(way, route, layer, load, machine).total_s

    def fits(way: Way) -> bool:
        route = choices.routes[way.route_degree or 1]
        return extra_bytes(way, route, layer, load) <= choices.budget_bytes

    ranked = sorted((way for way in choices.ways(load) if fits(way)), key=seconds)
    if not ranked:
        return [choices.usual]
    usual, limit = [way for way in ranked if way == choices.usual], HOPELESS * seconds(ranked[0])
    ranked = [way for way in ranked if seconds(way) <= limit]
    best_of_each = {way.route_degree: way for way in reversed(ranked)}
    wanted = list(dict.fromkeys([ranked[0], *best_of_each.values(), *usual, *ranked]))[:number]
    return sorted(wanted, key=seconds)


class _Bucket:
    """The trials of one bucket."""

    def __init__(self, ways: list[Way], num_trials: int) -> None:
        self.ways, self._num_trials = ways, num_trials
        self.times: dict[Way, list[float]] = {way: [] for way in ways}
        self._issued = dict.fromkeys(ways, 0)

    @property
    def settled(self) -> Way | None:
        """The fastest, when all trials are in; a way's first does not count, because it makes connections."""
        if len(self.ways) == 1:
            return self.ways[0]
        left = self._left()
        if any(len(self.times[way]) <= self._num_trials for way in left):
            return None
        return min(left, key=lambda way: median(self.times[way][1:]))

    def _left(self) -> list[Way]:
        """Ways that have not been seen to be slow."""
        seen = {way: min(times[1:]) for way, times in self.times.items() if len(times) > 1}
        limit = TOO_SLOW * min(seen.values(), default=0.0)
        return [way for way in self.ways if seen.get(way, 0.0) <= limit]

    def next_trial(self) -> Way | None:
        """A way to measure, all in turn; None: all trials are under way."""
        way = min(self._left(), key=self._issued.__getitem__)
        if self._issued[way] > self._num_trials:
            return None
        self._issued[way] += 1
        return way


@dataclass(frozen=True)
class Trial:
    """A call whose time is wanted.

    Attributes:
        bucket: of its load.
        way: that it takes.
    """

    bucket: str
    way: Way


class Tuner:
    """Chooses for all layers of one shape.

    Args:
        rank: gives the ways to measure under a load, the best by the model first.
        known: settled buckets.
        on_settled: told when a bucket is settled.
        num_trials: measurements of each way, after a first that does not count.
    """

    def __init__(
        self,
        rank: Callable[[TokenLoad, bool], list[Way]],
        *,
        known: Mapping[str, Way] | None = None,
        on_settled: Callable[[Mapping[str, Way]], None] | None = None,
        num_trials: int = NUM_TRIALS,
    ) -> None:
        self._rank, self._on_settled, self._num_trials = rank, on_settled, num_trials
        self.settled: dict[str, Way] = dict(known or {})
        self._buckets: dict[str, _Bucket] = {}

    def choose(self, load: TokenLoad, bucket: Bucket) -> tuple[Way, Trial | None]:
        """The way of a call, and the trial that it is; None: nobody asks for its time."""
        key = bucket.key
        if key in self.settled:
            return self.settled[key], None
        if key not in self._buckets:
            self._buckets[key] = _Bucket(self._rank(load, bucket.trains), self._num_trials)
        trials = self._buckets[key]
        if trials.settled is not None:
            self._settle(key, trials.settled)
            return self.settled[key], None
        way = trials.next_trial()
        return (trials.ways[0], None) if way is None else (way, Trial(key, way))

    def report(self, trial: Trial, seconds: float) -> None:
        """The time that a trial took, over all ranks."""
        trials = self._buckets.get(trial.bucket)
        if trials is None or trial.bucket in self.settled:
            return
        trials.times[trial.way].append(seconds)
        if trials.settled is not None:
            self._settle(trial.bucket, trials.settled)

    def _settle(self, key: str, way: Way) -> None:
        self.settled[key] = way
        if self._on_settled is not None:
            self._on_settled(self.settled)
