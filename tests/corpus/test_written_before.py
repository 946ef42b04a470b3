"""Folders that an earlier revision wrote are opened, and give what they gave: `files/` is written by write_corpus.py,
once."""

import json
import logging

import pytest
import torch
from tests.corpus.cases import CASES, FILES, TORCHAO
from tests.corpus.outcomes import folder_numbers, resumed_losses
from tests.oracle.numerics import relative_error

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import USUAL_NETWORK
from expertmesh.parallel.experts.tuning_cache import load_network, load_plans

EXPECTED = json.loads((FILES / "expected.json").read_text())
RESUMPTIONS = [(name, moments) for name, case in CASES.items() for moments in (None, *case.moments)]
_ROUNDING = 2.0**-20
"""Of losses computed in FP32 by sums of another order."""


@pytest.mark.parametrize(("name", "moments"), RESUMPTIONS)
def test_a_run_goes_on_with_the_losses_it_had(name, moments):
    with torch.compiler.set_stance("force_eager"):  # compiled steps of torchao are test_torchao_adamw.py's
        found, expected = resumed_losses(name, moments), EXPECTED["runs"][name][moments or "own"]
    if name.removeprefix("gpt-") in TORCHAO:  # its optimizer computes in FP32
        pairs = zip(found, expected, strict=True)
        assert all(relative_error(*pair) <= _ROUNDING for pair in pairs)
    else:
        assert found == expected


@pytest.mark.parametrize("name", EXPECTED["folders"])
def test_a_folder_has_its_logits(name):
    assert folder_numbers(name) == EXPECTED["folders"][name]


def test_the_tuners_files_are_read(caplog):
    with caplog.at_level(logging.WARNING):
        assert load_network(FILES / "tuner" / "network.json") == USUAL_NETWORK
        plans = load_plans(FILES / "tuner" / "plans.json", "a model")
    assert plans == {
        "1024": DispatchOptions(2, 4, "flat", 0),
        "2048": DispatchOptions(4, 1, "hierarchical", 1),
    }
    assert not caplog.records
