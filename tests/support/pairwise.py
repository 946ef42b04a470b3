"""Covering sets: few combinations of many factors, in which every two values that may meet do meet."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

_TRIES = 60
"""Random completions of a pair, of which the one that covers most is taken."""
_MOST_TRIES = 2000
"""After so many forbidden completions a pair counts as one that cannot be."""

Row = dict[str, Any]
_Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    *,
    cost: Callable[[Row], float] = lambda row: 1.0,
    seed: int = 0,
) -> list[Row]:
    """Combinations of values such that every pair of values of two factors is in one of them.

    Args:
        factors: values by factor.
        allowed: whether a complete combination may be. Pairs that occur in no allowed one are left out.
        cost: of a complete combination; cheap ones are preferred.
        seed: of the random choices; the same seed gives the same rows.

    Returns:
        Complete combinations, greedily few: not much more than the product of the two largest factors' sizes.
    """
    rng = random.Random(seed)
    names = list(factors)
    open_pairs: list[_Pair] = [
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    ]
    rng.shuffle(open_pairs)
    rows, left = [], set(open_pairs)
    for pair in open_pairs:
        if pair in left:
            best = _completed(pair, factors, allowed, cost, left, rng)
            if best is None:
                left.discard(pair)
                continue
            left -= set(combinations(best.items(), 2))
            rows.append({name: factors[name][i] for name, i in best.items()})
    return rows


def _completed(
    pair: _Pair,
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    cost: Callable[[Row], float],
    left: set[_Pair],
    rng: random.Random,
) -> dict[str, int] | None:
    """The completion of a pair, as indices, that covers most open pairs for its cost; None if none is allowed."""
    best, most, found = None, -1.0, 0
    for _ in range(_MOST_TRIES):
        drawn = {name: rng.randrange(len(values)) for name, values in factors.items()}
        drawn |= dict(pair)
        row = {name: factors[name][i] for name, i in drawn.items()}
        if not allowed(row):
            continue
        covered = len(left.intersection(combinations(drawn.items(), 2))) / cost(row)
        if covered > most:
            best, most = drawn, covered
        found += 1
        if found == _TRIES:
            break
    return best
