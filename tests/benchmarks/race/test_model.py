"""The model of each kernel's time: its work adds up, written predictions win, and a bad file is refused."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.race.report import predictions
from benchmarks.race.shapes import SHAPES, chosen

from benchmarks.race import model
from expertmesh.kernels import tile_tables, tiles

ROOT = Path(__file__).parents[3]

(QWEN,) = chosen(("qwen3-8k",))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_kernels_add_up_to_the_step(shape):
    products = [k for k in model.KERNELS if "combine" not in k and "router" not in k]
    assert sum(model.work(shape, k).flops for k in products) == shape.flops("both")
    experts = [k for k in model.FORWARD if k not in ("router", "maps")]
    assert sum(model.work(shape, k).num_bytes for k in experts) == shape.least_bytes("forward")
    for kernel in model.KERNELS:
        floor_s = model.work(shape, kernel).num_bytes / model.Chip().bytes_per_s
        assert model.modelled_s(shape, kernel) > floor_s


def test_a_slower_chip_takes_longer():
    slow = model.Chip(described=300e12, gathered=250e12, narrow=215e12, router=20e12)
    for kernel in model.KERNELS:
        assert model.modelled_s(QWEN, kernel, slow) >= model.modelled_s(QWEN, kernel)
    assert model.modelled_s(QWEN, "up", slow) > 1.8 * model.modelled_s(QWEN, "up")


def test_a_written_prediction_wins(tmp_path):
    file = tmp_path / "predictions.json"
    given = {"source": "a guess", "microseconds": {"qwen3-8k": {"up": 900}}}
    file.write_text(json.dumps(given))
    assert model.predicted(QWEN, "up", file) == model.Prediction(900.0, "a guess")
    assert model.predicted(QWEN, "down", file).source == "model"


@pytest.mark.parametrize("bad", [{"upp": 3.0}, {"up": 0}])
def test_a_file_with_a_mistake_is_refused(tmp_path, bad):
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps({"source": "", "microseconds": {"qwen3-8k": bad}}))
    with pytest.raises(ValueError, match="known are router"):
        model.predicted(QWEN, "up", file)


def test_every_kernel_of_every_shape_is_predicted_and_the_page_says_so():
    found = model.written()["microseconds"]
    assert {name: set(kernels) for name, kernels in found.items()} == {
        shape.name: set(model.KERNELS) for shape in SHAPES
    }
    page = predictions({"kernels": {}})
    assert (ROOT / "docs" / "predictions.md").read_text() == page
    measured = {"kernels": [{"kernel": k, "us": 4321.0} for k in model.KERNELS]}
    filled = predictions({"kernels": {"qwen3-8k": measured}})
    assert filled.count(" 4321 ") == len(model.KERNELS)
    assert filled.count("measured ") == page.count("measured ") + 2


def test_the_model_cuts_as_the_default_table_does():
    for shape in (s for s in SHAPES if s.num_rows / s.num_experts >= 256):
        plan = tiles.config_for(
            "sm_90",
            torch.bfloat16,
            rows_per_expert=shape.num_rows / shape.num_experts,
            dim=shape.dim,
            hidden_dim=shape.hidden_dim,
            num_branches=shape.num_branches,
        )
        for gemm in tile_tables.GEMMS:
            tile, cut = getattr(plan, gemm), model.cut(shape, gemm, model.Chip())
            branches = shape.num_branches if gemm == "up" else 1
            assert (tile.block_m, branches * tile.block_n) == (128, cut.columns), gemm
