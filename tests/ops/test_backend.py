"""The choice of the implementation and what doctor says of it."""

import pytest
import torch

from expertmesh.config.moe_rules import Backend
from expertmesh.errors import ConfigError
from expertmesh.ops.backend import explain_backends, resolve_backend


def test_auto_gives_one_that_works():
    working = {report.name for report in explain_backends() if report.works}
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) in working


def test_every_configurable_backend_resolves():
    for name in Backend.__args__:
        resolved = resolve_backend(name, torch.device("cpu"), torch.bfloat16)
        assert resolved == ("torch" if name == "auto" else name)


def test_reports_are_one_line_each():
    for report in explain_backends():
        assert report.why and "\n" not in report.why


@pytest.mark.parametrize(("name", "dtype"), [("fast", torch.float32), ("auto", torch.int32)])
def test_unknown_is_told(name, dtype):
    with pytest.raises(ConfigError):
        resolve_backend(name, torch.device("cpu"), dtype)
