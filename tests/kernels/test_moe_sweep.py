"""The experts' kernels in the interpreter over a covering set of shapes, traffic, types, activations and configs.

Every two values of two factors meet in a case that is checked by the two-times rule with poisoned outputs, forward and
all gradients. A few cases run by default, all in `make kernels-all`.
"""

from itertools import combinations, product

import pytest
import torch
from tests.support.experts_case import ExpertsCase, check_together
from tests.support.pairwise import covering
from tests.support.poison import poisoned_empty

from expertmesh.kernels.tile_tables import GEMMS
from expertmesh.kernels.tiles import Tile
from expertmesh.ops.activation import _INNER

# the sums of weight gradients are split wherever an expert has more rows than a piece
SPLIT = {"sharing": 60, "piece_rows": 32}
CONFIGS = {
    "default": {},
    # every loop of every kernel runs several times
    "small": dict.fromkeys(GEMMS, Tile(16, 16, 16, 4, 1, group_m=3)) | SPLIT,
    "descriptors": dict.fromkeys(GEMMS, Tile(32, 32, 32, 4, 1, group_m=3)) | SPLIT | {"tma": True},
}
FACTORS = {
    "tokens": [0, 1, 7, 128, 1000],
    "widths": [
        (16, 24),
        (64, 96),
        (9, 15),
        (33, 65),
        (16, 31),
        (31, 16),
    ],  # D, F: aligned, odd, mixed
    "experts": [1, 7, 8, 61, 64],
    "top_k": [1, 2, 8, "all"],
    "kind": ["uniform", "hot", "sparse", "zipf", "dropped"],
    "activation": sorted(_INNER),
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "config": list(CONFIGS),
    "bias": [False, True],
    "interleaved": [False, True],
    "recompute_h": [False, True],
}
MOST_SLOTS = 8192
MOST_STEPS = 600
"""The interpreter takes some milliseconds for a step of a product, and a case has six products."""
FEW_CHOICES = 16


def choices(row):
    return row["experts"] if row["top_k"] == "all" else row["top_k"]


def steps(row):
    """About how many steps one product of the case takes."""
    block_m, block = {"default": (32, 64), "small": (16, 16), "descriptors": (32, 32)}[row["config"]]
    num_slots = row["tokens"] * choices(row)
    row_tiles = num_slots // block_m + min(row["experts"], num_slots)
    D, F = row["widths"]
    return row_tiles * -(-D // block) * -(-F // block)


def allowed(row):
    descriptors = row["config"] == "descriptors"
    whole = all(width * row["dtype"].itemsize % 16 == 0 for width in row["widths"])
    return (
        choices(row) <= row["experts"]
        and row["tokens"] * choices(row) <= MOST_SLOTS
        and steps(row) <= MOST_STEPS
        and (whole or not descriptors)
    )


CASES = covering(FACTORS, allowed)


def label(row):
    return "-".join(str(v).removeprefix("torch.").replace(" ", "") for v in row.values())


def by_default():
    """The cheapest case with tokens of every type, and of every config."""
    for name, value in [(n, value) for n in ("dtype", "config") for value in FACTORS[n]]:
        of_value = [row for row in CASES if row["tokens"] > 1 and row[name] == value]
        yield min(of_value, key=lambda row: steps(row) + row["tokens"] * choices(row))


DEFAULT = list(by_default())


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=label(row), marks=[] if row in DEFAULT else pytest.mark.exhaustive) for row in CASES],
)
def test_two_times_rule(use_config, row):
    use_config(**CONFIGS[row["config"]])
    shape = (row["tokens"], *row["widths"], row["experts"], choices(row))
    options = {name: row[name] for name in ("kind", "activation", "dtype", "bias", "interleaved")}

    def run(case):
        with poisoned_empty():
            return case.run("triton", recompute_h=row["recompute_h"])

    num_choices = shape[0] * shape[4]
    draws = -(-FEW_CHOICES // num_choices) if num_choices else 1
    check_together([ExpertsCase.draw(shape, **options) for _ in range(draws)], run)


def test_cases_cover_all_pairs():
    assert all(allowed(row) for row in CASES)
    met = {(a, str(row[a]), b, str(row[b])) for row in CASES for a, b in combinations(FACTORS, 2)}
    for a, b in combinations(FACTORS, 2):
        for value, other in product(FACTORS[a], FACTORS[b]):
            impossible = {a: value, b: other} in impossible_pairs()
            assert ((a, str(value), b, str(other)) in met) is not impossible, (a, value, b, other)


def impossible_pairs():
    odd = [w for w in FACTORS["widths"] if any(width % 4 for width in w)]
    pairs = [{"widths": w, "config": "descriptors"} for w in odd]
    pairs += [{"experts": n, "top_k": k} for n in (1, 7) for k in (2, 8) if k > n]
    return pairs
