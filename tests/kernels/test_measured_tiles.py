"""Measured tiles win where their file has the architecture, the type and the shape; elsewhere the table stays."""

import json
from dataclasses import asdict, fields

import pytest
import torch

from expertmesh.kernels import measured, tiles
from expertmesh.kernels.tile_tables import GEMMS

SIZES = {"dim": 2048, "hidden_dim": 768, "num_branches": 2}


def config(arch="sm_90", dtype=torch.bfloat16, rows=512.0, **sizes):
    """Today's config, or the measured one."""
    return tiles.config_for(arch, dtype, rows_per_expert=rows, **SIZES | sizes)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of measured tiles in the place of the packaged one: entries for 512 and for 4096 rows per expert."""

    def entry(rows, group_m):
        found = {
            name: asdict(getattr(config(rows=rows), name)) | {"group_m": group_m, "source": "here"} for name in GEMMS
        }
        about = {"rows_per_expert": rows, "dtype": "bfloat16", "source": "here", "us": {}}
        return {"tiles": found} | about | SIZES

    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"sm_90": [entry(512.0, 4), entry(4096.0, 16)]}))
    nearest = measured.nearest
    monkeypatch.setattr(measured, "nearest", lambda *a, **k: nearest(*a, **k, file=path))


def test_the_nearest_entry_wins(file):
    for rows, group_m in ((512.0, 4), (300.0, 4), (1000.0, 4), (2100.0, 16), (8000.0, 16)):
        found = config(rows=rows)
        assert [getattr(found, name).group_m for name in GEMMS] == [group_m] * 6
        assert found.up.source == "here"
    assert all(getattr(found, f.name) is not None for f in fields(found))


@pytest.mark.parametrize(
    "other",
    [
        {"arch": "sm_80"},
        {"dtype": torch.float16},
        {"rows": 200.0},
        {"rows": 9000.0},
        {"dim": 4096},
        {"hidden_dim": 1024},
        {"num_branches": 1},
    ],
    ids=str,
)
def test_everything_else_stays(file, other):
    assert config(**other).up.source != "here"


def test_no_file_no_entries(tmp_path):
    assert measured.entries(tmp_path / "none.json") == {}
    assert measured.nearest("sm_90", "bfloat16", rows_per_expert=0.0, **SIZES) is None
