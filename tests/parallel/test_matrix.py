"""One oracle for every form of parallelism: some steps of a small GPT on many ranks equal those of one process.

The cases cover every pair of values of all factors (`tests.support.form_case`) that can meet on eight processes.
"""

from itertools import combinations, product

import pytest
from tests.oracle.numerics import FP64_RELATIVE
from tests.support.form_case import (
    CONSTRAINED,
    FormCase,
    allowed,
    assert_as_exact,
    cost,
    covering_factors,
    differences,
    run_form,
)
from tests.support.pairwise import covering

FACTORS = covering_factors()
ROWS = covering(FACTORS, allowed, cost=cost)
CASES = sorted((FormCase(**row) for row in ROWS), key=lambda case: case.num_processes)
STEPS, FEW_STEPS = 5, 2
"""The second step uses what the optimizer and the exchange kept of the first."""
OTHER_SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def pools(two_ranks, four_ranks, eight_ranks):
    return {2: two_ranks, 4: four_ranks, 8: eight_ranks}


def worst(case, pools, *, steps=STEPS):
    """The largest relative error of a case, and what it is in."""
    results = pools[case.num_processes].run(run_form, case, steps=steps)
    found = differences(case, results, steps=steps)
    return max(found.items(), key=lambda item: item[1])


def name_of(case):
    drops = "dropless" if case.drops == "none" else case.drops
    return f"{case.form}-{case.num_ranks}-K{case.top_k}-{drops}-{case.rows}-route_{case.route}-overlap_{case.overlap}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_some_steps_equal_one_process(pools, case):
    what, error = worst(case, pools, steps=FEW_STEPS)
    assert error <= FP64_RELATIVE, f"{what} is off by {error:.1e} in {case}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, *OTHER_SEEDS])
def test_other_covering_sets(pools, seed):
    for row in covering(FACTORS, allowed, seed=seed):
        what, error = worst(FormCase(**row), pools)
        assert error <= FP64_RELATIVE, f"{what} is off by {error:.1e} in {row}"


# Every token takes all experts: rounding must not decide on a choice.
ALL_EXPERTS = {"num_experts": 4, "top_k": 4, "num_ranks": 4, "dense_parts": True}
ROUNDED = [
    {"form": "E", "route": "middle", "rows": "unequal", "overlap": 4},
    {"form": "E+D", "es_degree": 2, "bias": True, "overlap": 2},
    {"form": "E+Z1", "route": "one", "activation": "gelu"},
    {"form": "E+D+M", "rows": "unequal", "recompute": True},
    {"form": "E+Z-Offload+M", "route": "middle", "rows": "zero"},
]


def by_turns():
    """Each form in one of the two types; in the other, too, where everything runs."""
    for number, options in enumerate(ROUNDED):
        for place, dtype in enumerate(("float32", "bfloat16")):
            marks = [] if number % 2 == place else [pytest.mark.exhaustive]
            yield pytest.param(options, dtype, marks=marks, id=f"{options['form']}-{dtype}")


@pytest.mark.parametrize(("options", "dtype"), list(by_turns()))
def test_as_exact_as_one_process_in_other_precisions(four_ranks, options, dtype):
    case = FormCase(**ALL_EXPERTS | options, dtype=dtype)
    assert_as_exact(case, four_ranks.run(run_form, case, steps=1))


def feasible_pairs():
    """Pairs of values that some allowed combination has; factors without constraints go with everything."""
    pairs = set()
    for values in product(*(FACTORS[name] for name in CONSTRAINED)):
        row = dict(zip(CONSTRAINED, values, strict=True))
        if allowed(row):
            free = [(n, v) for n in FACTORS if n not in CONSTRAINED for v in FACTORS[n]]
            pairs |= set(combinations(sorted(row.items()), 2))
            pairs |= {tuple(sorted(pair)) for pair in product(row.items(), free)}
            pairs |= {p for p in combinations(sorted(free, key=str), 2) if p[0][0] != p[1][0]}
    return pairs


def test_every_pair_is_covered():
    covered = {pair for row in ROWS for pair in combinations(sorted(row.items()), 2)}
    assert feasible_pairs() == covered
    assert len(covered) > 600
