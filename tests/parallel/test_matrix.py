"""One oracle for every form of parallelism: five steps of a small GPT on many ranks equal those of one process.

The cases cover every pair of values of all factors (`expertmesh.testing.form_case`) that can meet on eight processes.
"""

from itertools import combinations, product

import pytest

from expertmesh.testing.form_case import (
    CONSTRAINED,
    FormCase,
    allowed,
    covering_factors,
    differences,
    run_form,
)
from expertmesh.testing.numerics import FP64_RELATIVE
from expertmesh.testing.pairwise import covering

FACTORS = covering_factors()
ROWS = covering(FACTORS, allowed)
CASES = sorted((FormCase(**row) for row in ROWS), key=lambda case: case.num_processes)
STEPS = 5


@pytest.fixture(scope="module")
def pools(two_ranks, four_ranks, eight_ranks):
    return {2: two_ranks, 4: four_ranks, 8: eight_ranks}


def worst(case, pools):
    """The largest relative error of a case, and what it is in."""
    results = pools[case.num_processes].run(run_form, case, steps=STEPS)
    found = differences(case, results, steps=STEPS)
    return max(found.items(), key=lambda item: item[1])


def name_of(case):
    drops = "dropless" if case.drops == "none" else case.drops
    return f"{case.form}-{case.num_ranks}-K{case.top_k}-{drops}-{case.rows}-route_{case.route}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_five_steps_equal_one_process(pools, case):
    what, error = worst(case, pools)
    assert error <= FP64_RELATIVE, f"{what} is off by {error:.1e} in {case}"


def feasible_pairs():
    """Pairs of values that some allowed combination has; factors without constraints go with everything."""
    pairs = set()
    for values in product(*(FACTORS[name] for name in CONSTRAINED)):
        row = dict(zip(CONSTRAINED, values, strict=True))
        if allowed(row):
            free = [(n, v) for n in FACTORS if n not in CONSTRAINED for v in FACTORS[n]]
            pairs |= set(combinations(sorted(row.items()), 2))
            pairs |= {tuple(sorted(pair)) for pair in product(row.items(), free)}
            pairs |= {p for p in combinations(sorted(free), 2) if p[0][0] != p[1][0]}
    return pairs


def test_every_pair_is_covered():
    covered = {pair for row in ROWS for pair in combinations(sorted(row.items()), 2)}
    assert feasible_pairs() == covered
    assert len(covered) > 600
