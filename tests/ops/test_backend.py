"""The choice of the implementation and what doctor says of it."""

from unittest.mock import patch

import pytest
import torch

from expertmesh.config.model import Backend
from expertmesh.errors import ConfigError
from expertmesh.ops import backend
from expertmesh.ops.backend import explain_backends, gemm_rows, resolve_backend


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


@pytest.mark.parametrize(("is_narrow", "parts"), [(False, 32), (True, 8)])
def test_row_counts_of_bf16_products_are_few(is_narrow, parts):
    cpu = torch.device("cpu")
    rows = {n: gemm_rows(n, cpu, torch.bfloat16, is_narrow=is_narrow) for n in range(2048)}
    assert all(n <= m <= n + n // parts for n, m in rows.items())
    assert len({rows[n] for n in range(1024, 2048)}) <= parts + 1
    assert gemm_rows(1025, cpu, torch.float64, is_narrow=is_narrow) == 1025
    for generates_code in (False, True):
        with patch.object(backend, "goes_to_onednn", return_value=generates_code):
            found = gemm_rows(1025, cpu, torch.float32, is_narrow=is_narrow)
        assert found == (rows[1025] if generates_code else 1025)
