"""Routing kernels compile for every GPU target, without spills, with wide loads and without global atomics.

No GPU is needed: see tests.support.aot. All variants for all targets are built in `make kernels-all`; what is
built by default is part of the covering set of test_compile_cover.py.
"""

import re

import pytest
from tests.support.aot import TARGETS
from tests.support.build_rules import GLOBAL_ATOMIC, check_routing
from tests.support.routing_builds import further_cases, main_cases

CASES = (*main_cases().values(), *further_cases())


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_variant_builds(case, target):
    check_routing(case, case.build(target))


@pytest.mark.exhaustive
def test_the_histogram_counts_in_shared_memory():
    count = main_cases()["count"]
    for target, pattern in (("sm_90", r"\b(atom|red)(\.\w+)*\.shared"), ("gfx942", r"ds_add")):
        made = count.build(target)
        assert re.search(pattern, made.assembly)
        assert re.search(GLOBAL_ATOMIC[target[:2]], made.assembly) is None
