"""From finished losses to ratios and intervals."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

Ladder = Mapping[int, float]
"""Finished losses in nats by the tokens of their runs."""


def tokens_at(ladder: Ladder, loss: float) -> float | None:
    """Tokens after which a finished run has a loss: log tokens interpolated between the two runs around it.

    None where no two runs are around it: nothing is extrapolated.
    """
    points = sorted(ladder.items())
    for (few, high), (many, low) in zip(points, points[1:], strict=False):
        if low <= loss <= high:
            part = (high - loss) / (high - low) if high > low else 0.0
            return math.exp(math.log(few) + part * (math.log(many) - math.log(few)))
    return None


def token_ratio(
    better: Ladder, other: Ladder, tokens: int, *, flops: float = 1.0
) -> tuple[float, bool] | None:
    """How many times fewer tokens the better model needs for the loss that the other has after some tokens.

    Args:
        better: finished losses of the one.
        other: of the other.
        tokens: a budget of the other.
        flops: operations per token of the better one over those of the other; the ratio is divided by it.

    Returns:
        The ratio, and whether it is only a lower bound: the shortest run of the better model is below that loss already.
        None where even its longest run is above.
    """
    loss, shortest = other[tokens], min(better)
    if loss >= better[shortest]:
        return tokens / shortest / flops, True
    needed = tokens_at(better, loss)
    return None if needed is None else (tokens / needed / flops, False)


def bootstrap(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], draws: int = 10_000
) -> tuple[float, float]:
    """95 % interval of a statistic over seeds, by drawing seeds with replacement; always the same draws."""
    generator = random.Random(0)
    found = sorted(statistic(generator.choices(values, k=len(values))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws) - 1]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(mean([math.log(v) for v in values]))
